"""Peers that are forked from one process share no locks of hivemind's modules."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os, signal
import rayhive.strategy.dht
from rayhive.strategy.forked_locks import held_locks, renew_locks

holders = {f"{holder.__name__}.{name}" for holder, name, _ in held_locks()}
print("locks", *sorted(holders))
read, write = os.pipe()
first = os.fork()
if first == 0:
    renew_locks()
    for _, _, lock in held_locks():
        lock.acquire()
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
os.kill(first, signal.SIGKILL)  # it dies with every lock
os.waitpid(first, 0)
second = os.fork()
if second == 0:
    renew_locks()
    mine = [lock for _, _, lock in held_locks()]
    got = all(lock.acquire(block=False) for lock in mine)
    print("second", got, len(mine), flush=True)
    os._exit(0)
os.waitpid(second, 0)
print("parent", all(lock.acquire(block=False) for _, _, lock in held_locks()))
"""


def test_a_peer_that_dies_with_a_lock_does_not_block_another() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr
    lines = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    locks = lines["locks"].split()
    assert "MPFuture._update_lock" in locks and "MPFuture._initialization_lock" in locks
    assert lines["second"] == f"True {len(locks)}"
    assert lines["parent"] == "True"
