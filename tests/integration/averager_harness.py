"""Scenarios of real averagers in a process of their own, which may leave no process behind."""

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
#: Shapes of the averaged tensors: matrices, a convolution, vectors, a single element and, last, a
#: tensor that never gets a gradient.
SHAPES = [(48, 40), (48,), (24, 8, 3, 3), (1,), (30, 50), (7,), (11,)]


def run_scenario(name: str, *, limit: float = 90.0, **arguments: Any) -> Any:
    """Run ``averager_scenarios.NAME`` in a new session, and return its result.

    Raises:
        AssertionError: As for :func:`run_module`.
    """
    output = run_module(
        "tests.integration.averager_scenarios", name, json.dumps(arguments), limit=limit
    )
    results = [line for line in output.splitlines() if line.startswith(MARK)]
    assert results, f"{name} returned nothing\n{output}"
    return json.loads(results[-1].removeprefix(MARK))


def run_module(module: str, *arguments: str, limit: float) -> str:
    """Run a module in a new session, and return its output.

    Raises:
        AssertionError: It fails, takes longer than ``limit`` [s], or leaves a process behind.
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
    """Return the processes of a session that still run after five seconds."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=5)
    return [f"{process.pid} {process.name()}" for process in alive]
