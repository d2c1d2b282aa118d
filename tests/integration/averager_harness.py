"""Runs a scenario of real averagers in a process of its own and looks after what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "
#: What the scenarios average: matrices, a convolution, vectors, a single element and, last, a
#: tensor that never gets a gradient; and the size of their parts, so that each peer reduces some.
SHAPES = [(48, 40), (48,), (24, 8, 3, 3), (1,), (30, 50), (7,), (11,)]
PART_SIZE = 2**10


def run_scenario(name: str, *, limit: float = 90.0, **arguments: Any) -> Any:
    """Run ``averager_scenarios.NAME`` in a fresh session; return what it returned.

    Fails if it fails, or if any of its processes outlives it.
    """
    output = run_module(
        "tests.integration.averager_scenarios", name, json.dumps(arguments), limit=limit
    )
    results = [line for line in output.splitlines() if line.startswith(MARK)]
    assert results, f"{name} returned nothing\n{output}"
    return json.loads(results[-1].removeprefix(MARK))


def run_module(module: str, *arguments: str, limit: float) -> str:
    """Run a module in a fresh session; return what it printed.

    Fails if it fails or takes longer than ``limit`` [s], or if any of its processes outlives it.
    """
    name = " ".join([module, *arguments])
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{name} took longer than {limit} s\n{output}") from None
        left = survivors(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{name} failed\n{output}"
    assert not left, f"{name} left {left}\n{output}"
    return output


def survivors(session: int) -> list[str]:
    """Return the processes of a session that are still there after a moment of grace."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=5)
    return [f"{process.pid} {process.name()}" for process in alive]
