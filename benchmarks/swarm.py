"""Runs the same peer function in several processes and joins them into one swarm.

Every peer is a fresh interpreter that runs the calling script with ``--peer INDEX``. Peer 0
prints its addresses; the others get them. What a peer prints as its last line is its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_swarm(script: str, peers: int, settings: dict[str, Any], timeout: float) -> list[Any]:
    """Run ``script --peer I --settings JSON`` for every peer and return their results.

    Args:
        script: Path of the benchmark.
        peers: Number of peers.
        settings: Passed to every peer as JSON.
        timeout: Longest time of the whole swarm [s].
    """
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
                process = subprocess.Popen(
                    [sys.executable, script, "--peer", str(index)],
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
            return [json.loads(_last_line(process, timeout)) for process in processes]
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _last_line(process: subprocess.Popen[str], timeout: float) -> str:
    out, _ = process.communicate(timeout=timeout)
    return out.strip().splitlines()[-1]


def conditions() -> str:
    """Return one line that says what was measured on."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hivemind"))
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    return f"{machine}, Python {platform.python_version()}, {packages}"
