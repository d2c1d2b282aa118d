"""Resolution and probing of the address of a Ray cluster, before anything else starts.

``ray.init`` waits a minute for an address without a cluster, and possibly forever for a cluster of
another version or one that requires a token. So the connection is first tried in a separate
process, which can be killed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

from rayhive.errors import ConfigError, Problem

KEY = "--address"
_CONNECT_TIMEOUT = 3.0
_PROBE_TIMEOUT = 15.0
#: Set by Ray in the driver of a submitted job.
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_ALLOWED = "HOST:PORT of a running Ray cluster (the port of its head, 6379 by default), or auto"

_PROBE = """
import json, os, sys
try:
    import ray
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
    print(json.dumps({"ray": ray.__version__}))
except BaseException as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Target:
    """A cluster that answered.

    Attributes:
        address: Address for ``ray.init``.
        in_job: Whether this process is the driver of a submitted job.
        auth_mode: ``RAY_AUTH_MODE`` to set for this cluster; None to leave it as it is.
    """

    address: str
    in_job: bool
    auth_mode: str | None = None


def resolve(address: str | None) -> Target | None:
    """Return the cluster to connect to, or None for an embedded one.

    Args:
        address: Address that the user gave; None for ``RAY_ADDRESS``.

    Raises:
        ConfigError: The address is malformed, or no usable cluster answers there.
    """
    given = named(address)
    if given is None:
        return None
    if given != "auto":
        _knock(given)
    if in_job():
        return Target(given, True)  # the cluster itself started this process
    return Target(given, False, _auth_mode(given))


def named(address: str | None) -> str | None:
    """Return the address of the cluster to connect to, or None for an embedded one."""
    given = address or os.environ.get("RAY_ADDRESS") or None
    return None if given == "local" else given


def in_job() -> bool:
    """Return whether this process is the driver of a job that was submitted to a cluster."""
    return _JOB_VARIABLE in os.environ


def _knock(given: str) -> None:
    """Check the form of an address, and that something answers there."""
    host, colon, port = given.rpartition(":")
    if "://" in given:
        hint = "the HOST:PORT of the cluster's head; to run on a remote cluster use `ray job "
        hint += "submit --working-dir . -- rayhive sweep FILE`, which takes such an address"
        raise ConfigError(Problem(KEY, given, hint))
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(Problem(KEY, given, _ALLOWED))
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
    except OSError as error:
        text = f"{_ALLOWED}; nothing answers there ({error})"
        raise ConfigError(Problem(KEY, given, text)) from error


def _auth_mode(given: str) -> str | None:
    """Return the value of ``RAY_AUTH_MODE`` to connect with; None to leave it as it is.

    A cluster that was started on a machine with a token requires it, but ``ray.init`` sends a token
    only if ``RAY_AUTH_MODE`` is ``token``.
    """
    answer = _probe(given, None)
    if "error" not in answer:
        return None
    if "Authentication" in answer["error"]:
        if "RAY_AUTH_MODE" not in os.environ and "error" not in _probe(given, "token"):
            return "token"
        text = (
            "a cluster whose token is known: this one refused the connection; put its token into "
            "RAY_AUTH_TOKEN, or into the file that RAY_AUTH_TOKEN_PATH names"
        )
        raise ConfigError(Problem(KEY, given, text))
    reason = answer["text"].strip().splitlines()[0] if answer["text"].strip() else answer["error"]
    raise ConfigError(Problem(KEY, given, f"{_ALLOWED}; it can't be joined: {reason}"))


def _probe(given: str, mode: str | None) -> dict[str, str]:
    """Connect to the cluster in another process; return ``error`` and ``text`` if that fails."""
    env = dict(os.environ) | ({"RAY_AUTH_MODE": mode} if mode is not None else {})
    process = subprocess.Popen(
        [sys.executable, "-c", _PROBE, given],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output: list[str] = []
    watchdog = threading.Timer(_PROBE_TIMEOUT, process.kill)
    watchdog.start()
    try:
        for line in process.stdout or ():
            if "InvalidAuthToken" in line or "Unauthenticated" in line:
                return {"error": "AuthenticationError", "text": "it requires a token"}
            if line.startswith("{"):
                answer: dict[str, str] = json.loads(line)
                return answer
            output.append(line)
    finally:
        watchdog.cancel()
        process.kill()  # Ray itself would retry for longer
        process.communicate()
    text = output[-1].strip() if output else f"no answer within {_PROBE_TIMEOUT:g} s"
    return {"error": "Failure", "text": text}
