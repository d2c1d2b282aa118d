"""Swarms of peers in fresh processes, for benchmarks.

Every peer is a new interpreter that runs the calling script with ``--peer INDEX``. Peer 0 prints
its addresses, and the other peers receive them. The last line that a peer prints is its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1


def run_swarm(
    script: str,
    peers: int,
    settings: dict[str, Any],
    timeout: float,
    launchers: Sequence[Sequence[str]] = (),
) -> list[Any]:
    """Run ``script --peer I`` for every peer and return their results.

    Args:
        script: Path of the benchmark.
        peers: Number of peers.
        settings: Settings, passed to every peer as a line of JSON.
        timeout: Time limit of the whole swarm [s].
        launchers: Prefix of each peer's command, see :mod:`benchmarks.links`.
    """
    end_on_sigterm()
    deadline = time.monotonic() + timeout
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HIVEMIND_LOGLEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as log:
        try:
            addresses: list[str] = []
            for index in range(peers):
                launcher = launchers[index] if launchers else ()
                process = subprocess.Popen(
                    [*launcher, sys.executable, script, "--peer", str(index)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
                processes.append(process)
            for process in processes:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(
                    json.dumps({**settings, "peers": peers, "initial_peers": addresses}) + "\n"
                )
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError("a peer ended before it was ready")
                addresses = addresses or json.loads(line)
            return [json.loads(_last_line(process, deadline)) for process in processes]
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _last_line(process: subprocess.Popen[str], deadline: float) -> str:
    out, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    if not out.strip():
        raise RuntimeError(f"a peer ended with exit code {process.returncode}")
    return out.strip().splitlines()[-1]


def end_on_sigterm() -> None:
    """Let SIGTERM raise ``SystemExit``, so that clean-up code runs as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def die_with_parent() -> None:
    """Let the kernel kill this process, and its forks, when their parents end."""
    libc = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    ask_the_kernel()
    os.register_at_fork(after_in_child=ask_the_kernel)


def join_swarm(initial_peers: list[str], host: str = "127.0.0.1") -> Any:
    """Return a running DHT of this peer, and print its addresses for :func:`run_swarm`."""
    import hivemind

    dht = hivemind.DHT(
        initial_peers=initial_peers or None,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        use_relay=False,
        start=True,
    )
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    return dht


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def conditions() -> str:
    """Return one line with the machine and the versions of the important packages."""
    packages = ", ".join(map(_version, ("torch", "hivemind", "numba")))
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    return f"{machine}, Python {platform.python_version()}, {packages}"
