"""Real peers with a preemption notice: they lose no samples if there is time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import PeerLine, digits_peers, start_swarm
from tests.integration.test_faults_in_training import assert_books_balance
from tests.integration.test_liveness import listen, rounds, stop

pytestmark = [pytest.mark.swarm]

BATCH = 16
NOTICE_S = 3.0


def specs(run_id: str, peers: int, target: int, **configuration: Any) -> list[PeerSpec]:
    swarm = {"target_batch_size": target, "batch_size": BATCH}
    return digits_peers(
        run_id, peers, swarm=swarm, configuration=configuration, evaluate_every=100 * target
    )


def assert_has_left(line: PeerLine, others: list[PeerLine], lost: int | None = 0) -> dict[str, Any]:
    """Wait until a peer has ended by itself; return its last events.

    The others are read meanwhile: a peer with a full channel waits, and its group with it.
    """
    listen([line, *others], lambda: bool(line.of("exited")))
    assert line.of("exited")[0]["exit_code"] == 0, line.story()
    (left,), (finished,) = line.of("left"), line.of("peer_finished")
    assert finished["reason"] == "notice" and line.of("notice") and not line.of("peer_failed")
    assert lost is None or left["lost"] == lost, line.story()
    assert_books_balance(line)
    entered = sum(event["samples"] for event in rounds(line))
    before = sum(event["lost"] for event in rounds(line))
    assert finished["samples"] == entered + before + left["lost"]
    return left


@pytest.mark.parametrize("delay", ["none", pytest.param("gradients", marks=pytest.mark.slow)])
def test_peers_that_are_asked_to_go_hand_over_all_and_the_others_go_on(
    socket_path: str, tmp_path: Path, delay: str
) -> None:
    lines = start_swarm(socket_path, specs(f"go-{delay}", 3, 96, delay=delay), tmp_path)
    listen(lines, lambda: all(len(rounds(line, group_size=3)) >= 3 for line in lines))

    leaving, *lines = lines  # the oldest
    leaving.command("leave")
    assert_has_left(leaving, lines)
    left = time.time()
    listen(lines, lambda: all(len(rounds(line, left, group_size=2)) >= 3 for line in lines))

    leaving, survivor = lines
    noticed = time.time()
    leaving.command("notice", deadline_s=NOTICE_S)
    said = assert_has_left(leaving, [survivor])
    assert leaving.of("left")[0]["t"] - noticed <= NOTICE_S
    assert said["handed_over"] > 0
    listen([survivor], lambda: len(rounds(survivor, outcome="alone")) >= 3)
    assert not survivor.of("fallback"), survivor.story()
    stop([survivor])


def test_a_round_that_would_come_too_late_is_begun_at_once(
    socket_path: str, tmp_path: Path
) -> None:
    endless = 10_000_000
    lines = start_swarm(socket_path, specs("hurry", 3, endless), tmp_path)
    leaving, *staying = lines
    leaving.command("notice", deadline_s=NOTICE_S)
    said = assert_has_left(leaving, staying)
    assert said["handed_over"] == leaving.of("peer_finished")[0]["samples"] > 0
    listen(staying, lambda: all(rounds(line) for line in staying))
    for line in lines:
        (only,) = rounds(line)
        assert only["outcome"] == "averaged" and only["group_size"] == 3
        assert 0 < only["samples"] < endless
    stop(staying)


def test_sigterm_is_a_short_notice_and_no_notice_loses_what_is_pending(
    socket_path: str, tmp_path: Path
) -> None:
    lines = start_swarm(socket_path, specs("sigterm", 3, 10_000_000), tmp_path)
    reclaimed, doomed, survivor = lines
    os.kill(reclaimed.pid, signal.SIGTERM)
    assert assert_has_left(reclaimed, lines[1:])["handed_over"] > 0
    listen(lines[1:], lambda: all(rounds(line) for line in lines[1:]))
    time.sleep(0.1)  # something has to be pending
    doomed.command("notice", deadline_s=0.0)
    said = assert_has_left(doomed, [survivor], lost=None)
    assert said["lost"] > 0 and said["handed_over"] == 0
    stop([survivor])


def test_a_signal_to_the_whole_group_says_goodbye_too(socket_path: str, tmp_path: Path) -> None:
    lines = start_swarm(socket_path, specs("group", 2, 10_000_000), tmp_path)
    reclaimed, survivor = lines
    # the signal also ends the process that would remove shared memory: the agent of a node does it
    owned = OwnedProcesses(leader=reclaimed.pid)
    owned.note()
    os.killpg(reclaimed.pid, signal.SIGTERM)
    # the network daemon does not ignore it: samples not handed over by then are lost
    said = assert_has_left(reclaimed, [survivor], lost=None)
    assert said["lost"] + said["handed_over"] > 0
    stop([survivor])
    owned.remove()


def test_a_peer_that_has_not_begun_leaves_too(socket_path: str, tmp_path: Path) -> None:
    (spec,) = specs("early", 1, 96)
    line = PeerLine(socket_path, spec, tmp_path / "log")
    line.command("leave")
    listen([line], lambda: bool(line.of("exited")))
    assert line.of("exited")[0]["exit_code"] == 0
    assert line.of("left")[0]["lost"] == 0
