"""The watchdog notices a dead process and fails the futures that wait for it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from hivemind.utils import MPFuture

from rayhive.optim.watchdog import PeerProcessDied, ProcessWatchdog, WaitInterrupted


@pytest.fixture
def process() -> subprocess.Popen[bytes]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def kill_and_wait(
    process: subprocess.Popen[bytes], watch: ProcessWatchdog, noticed: threading.Event
) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL)
        assert noticed.wait(20)
    finally:
        watch.close()


def test_a_death_fails_present_and_later_futures(process: subprocess.Popen[bytes]) -> None:
    errors: list[PeerProcessDied] = []
    noticed = threading.Event()

    def on_death(error: PeerProcessDied) -> None:
        errors.append(error)
        noticed.set()

    watch = ProcessWatchdog({"averager": process.pid}, on_death)
    try:
        watch.check()
        before: MPFuture[None] = MPFuture()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerProcessDied, match=rf"averager \(pid {process.pid}\) died"):
            before.result(timeout=20)
        assert noticed.wait(20)
        later: MPFuture[None] = MPFuture()
        with pytest.raises(PeerProcessDied):
            later.result(timeout=20)
        with pytest.raises(PeerProcessDied):
            watch.check()
        assert errors == [watch.error]
    finally:
        watch.close()


def test_a_death_is_noticed_with_more_than_a_thousand_files_open(
    process: subprocess.Popen[bytes],
) -> None:
    """Every tensor that is shared with another process has a descriptor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    noticed = threading.Event()
    files = [os.dup(0) for _ in range(1100)]
    watch = ProcessWatchdog({"averager": process.pid}, lambda _: noticed.set())
    try:
        kill_and_wait(process, watch, noticed)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_death_is_noticed_without_pidfds(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    noticed = threading.Event()
    watch = ProcessWatchdog({"daemon": process.pid}, lambda _: noticed.set())
    kill_and_wait(process, watch, noticed)


def test_an_expected_end_is_no_death(process: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatchdog({"averager": process.pid}, lambda error: pytest.fail(str(error)))
    watch.expect_ends()
    process.communicate(b"\n")
    watch.check()
    watch.close()
    watch.close()
    assert watch.error is None


def test_an_interrupt_fails_waits_until_it_is_over(process: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatchdog({"averager": process.pid}, lambda error: pytest.fail(str(error)))
    try:
        present: MPFuture[None] = MPFuture()
        watch.interrupt()
        with pytest.raises(WaitInterrupted):
            present.result(timeout=20)
        later: MPFuture[None] = MPFuture()
        with pytest.raises(WaitInterrupted):
            later.result(timeout=20)
        with pytest.raises(WaitInterrupted):
            watch.check()
        watch.resume()
        watch.check()
        assert watch.error is None
    finally:
        watch.close()
