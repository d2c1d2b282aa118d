"""Addresses at which peers find each other: those to join at, and those to announce."""

from __future__ import annotations

import ipaddress
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from rayhive.errors import ConfigError, Problem

#: Environment variables with initial peers, separated by commas. The first one that is set counts.
PEERS_VARIABLES = ("PL_INITIAL_PEERS", "INITIAL_PEERS")


def initial_peers(
    given: str | Iterable[Any] | None, environ: Mapping[str, str] = os.environ
) -> list[str] | None:
    """Return the addresses to join at, or None to begin a swarm.

    Args:
        given: The user's argument: one address, several separated by commas, or strings or
            ``Multiaddr`` objects. It takes precedence over the environment.
        environ: The environment; see :data:`PEERS_VARIABLES`.
    """
    if given is None:
        given = next((environ[name] for name in PEERS_VARIABLES if environ.get(name)), None)
    if given is None:
        return None
    items = given.split(",") if isinstance(given, str) else [str(item) for item in given]
    return [item.strip() for item in items if item.strip()] or None


def tcp_address(host: str) -> str:
    """Return the multiaddress at which a peer listens on a free port.

    Args:
        host: IPv4 or IPv6 address of this machine.

    Raises:
        ConfigError: It is no such address.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise ConfigError(Problem("host", host, "an IPv4 or IPv6 address")) from error
    return f"/ip{version}/{host}/tcp/0"


def reachable(addresses: Iterable[Any]) -> list[str]:
    """Return the addresses that another machine can use; loopback addresses if there are none."""
    every = [str(address) for address in addresses]
    return [address for address in every if not _is_loopback(address)] or every


def _is_loopback(address: str) -> bool:
    """Return whether a multiaddress, such as ``/ip4/127.0.0.1/tcp/1``, stays on the machine."""
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return False
    try:
        return ipaddress.ip_address(parts[2].partition("%")[0]).is_loopback
    except ValueError:
        return False


def join_message(run_id: str, addresses: Sequence[str], command: str) -> str:
    """Return the message that explains how other machines join. Each way is one line to paste."""
    joined = ",".join(addresses)
    return (
        f"This peer takes part in the run {run_id!r}. Other machines join it with the same "
        f"command and one variable:\n"
        f"INITIAL_PEERS={joined} {command}\n"
        f"or by passing the peers to the strategy:\n"
        f"HivemindStrategy(initial_peers='{joined}')"
    )


def same_command(interpreter: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the command that started this process, in a form for other machines.

    Args:
        interpreter: ``sys.orig_argv``.
        arguments: ``sys.argv``.
    """
    script = arguments[0] if arguments else ""
    options = list(takewhile(lambda text: text.startswith("-"), interpreter[1:]))
    if script in ("", "-c", "-") or "-c" in options:
        return "python ..."
    # An installed command is started by its full path, in the folder of its interpreter.
    if os.path.isabs(script) and os.path.dirname(script) == os.path.dirname(interpreter[0]):
        return shlex.join([os.path.basename(script), *arguments[1:]])
    return shlex.join(["python", *interpreter[1:]])
