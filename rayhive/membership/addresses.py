"""Where peers find each other: the addresses that are given, and those that are told to others."""

from __future__ import annotations

import ipaddress
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

#: Environment variables that hold initial peers, comma separated; the first that is set counts.
PEERS_VARIABLES = ("PL_INITIAL_PEERS", "INITIAL_PEERS")


def initial_peers(
    given: str | Iterable[Any] | None, environ: Mapping[str, str] = os.environ
) -> list[str] | None:
    """Return the addresses to join at, or None to begin a swarm.

    Args:
        given: What the user passed: one address, several separated by commas, or a list of
            strings or ``Multiaddr`` objects. It wins over the environment.
        environ: The environment; see :data:`PEERS_VARIABLES`.
    """
    if given is None:
        given = next((environ[name] for name in PEERS_VARIABLES if environ.get(name)), None)
    if given is None:
        return None
    items = given.split(",") if isinstance(given, str) else [str(item) for item in given]
    return [item.strip() for item in items if item.strip()] or None


def reachable(addresses: Iterable[Any]) -> list[str]:
    """Return the addresses that another machine can use; loopback ones if there are no others."""
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
    """Return the text that tells how other machines join; each way is one line to paste."""
    joined = ",".join(addresses)
    return (
        f"This peer takes part in the run {run_id!r}. Other machines join it with the same "
        f"command and one variable:\n"
        f"INITIAL_PEERS={joined} {command}\n"
        f"or by passing the peers to the strategy:\n"
        f"HivemindStrategy(initial_peers='{joined}')"
    )


def same_command(interpreter: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the command that this process was started with, as another machine has it.

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
