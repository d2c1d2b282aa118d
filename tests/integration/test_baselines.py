"""Baselines in real peer processes: equal replicas, one end, counted bytes, a lost member."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.spec import WorkloadConfig
from rayhive.spec.replicate import PeerSpec
from tests.fixtures.unequal_evaluation import SLOW_S
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peers,
    finish_swarm,
    forkserver,
    kill_groups,
    start_swarm,
)

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with forkserver() as path:
        yield path


def members(name: str, peers: int, **settings: Any) -> list[PeerSpec]:
    given = {"evaluate_every": 240, "configuration": {}, "seconds": 60, **settings}
    specs = digits_peers(name, peers, **given)
    return [spec.model_copy(update={"baseline": name}) for spec in specs]


def sketches(line: PeerLine) -> list[list[float]]:
    return [event["sketch"] for event in line.of("weights")]


def test_members_of_ddp_hold_equal_weights_and_send_two_thirds_twice(
    server: str, tmp_path: Path
) -> None:
    # 100 samples of a round are 5 batches of 8 of each of three members, that is 120
    swarm = {"target_batch_size": 100, "batch_size": 8}
    lines = start_swarm(server, members("ddp", 3, swarm=swarm, samples=480), tmp_path)
    finish_swarm(lines)
    dense = lines[0].of("peer_ready")[0]["dense_payload_bytes"]
    for line in lines:
        assert [event["round"] for event in line.of("round")] == [1, 2, 3, 4]
        assert {event["samples"] for event in line.of("round")} == {40}
        assert {event["outcome"] for event in line.of("round")} == {"averaged"}
        assert {event["sent_bytes"] for event in line.of("round")} == {round(4 / 3 * dense)}
        assert [event["round"] for event in line.of("evaluation")] == [2, 4]
        assert sketches(line) == sketches(lines[0])
        (end,) = line.of("peer_finished")
        assert (end["reason"], end["samples"], end["pending"]) == ("rounds", 160, 0)
    losses = [event["values"]["loss"] for event in lines[0].of("evaluation")]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("name", "less_than"), [("ddp-fp16", 0.51), ("ddp-powersgd", 0.3)])
def test_hooks_send_less_and_keep_replicas_equal(
    name: str, less_than: float, server: str, tmp_path: Path
) -> None:
    swarm = {"target_batch_size": 32, "batch_size": 8}
    lines = start_swarm(server, members(name, 2, swarm=swarm, samples=192), tmp_path)
    finish_swarm(lines)
    dense = lines[0].of("peer_ready")[0]["dense_payload_bytes"]
    last = [line.of("round")[-1] for line in lines]
    assert {event["round"] for event in last} == {6}
    assert all(0 < event["sent_bytes"] < less_than * dense for event in last)
    assert sketches(lines[0]) == sketches(lines[1])


def test_members_of_local_sgd_step_alone_and_send_their_parameters_once_a_round(
    server: str, tmp_path: Path
) -> None:
    # 4 batches of the swarm of 50 samples are 9 steps of each of three members, that is 216
    swarm = {"target_batch_size": 50, "batch_size": 8}
    lines = start_swarm(server, members("local-sgd", 3, swarm=swarm, samples=432), tmp_path)
    finish_swarm(lines)
    dense = lines[0].of("peer_ready")[0]["dense_payload_bytes"]
    for line in lines:
        assert [event["round"] for event in line.of("round")] == [1, 2]
        assert {event["samples"] for event in line.of("round")} == {72}
        assert {event["sent_bytes"] for event in line.of("round")} == {round(4 / 3 * dense)}
        assert sketches(line) == sketches(lines[0])
    losses = [[event["loss"] for event in line.of("round")] for line in lines]
    assert losses[0] != losses[1]  # of data of their own


@pytest.mark.parametrize("name", ["ddp", "local-sgd"])
def test_a_slow_evaluation_is_no_training_time_of_the_others(
    name: str, server: str, tmp_path: Path
) -> None:
    swarm = {"target_batch_size": 32, "batch_size": 8}
    evaluations = {"evaluate_every": 128, "samples": 128 * 6}
    workload = WorkloadConfig(import_path="tests.fixtures.unequal_evaluation:UnequalDigits")
    specs = [
        spec.model_copy(update={"workload": workload})
        for spec in members(name, 2, swarm=swarm, **evaluations)
    ]
    fast, slow = start_swarm(server, specs, tmp_path)
    finish_swarm([fast, slow])
    before_the_end = len(slow.of("evaluation")) - 1
    assert before_the_end == 5
    assert fast.of("peer_finished")[0]["clock_s"] < before_the_end * SLOW_S / 2


def test_all_members_stop_in_the_same_round_when_one_is_asked_to(
    server: str, tmp_path: Path
) -> None:
    swarm = {"target_batch_size": 32, "batch_size": 8}
    lines = start_swarm(server, members("ddp", 2, swarm=swarm), tmp_path)
    lines[0].wait_for("evaluation")
    lines[1].command("stop", reason="target")
    finish_swarm(lines)
    ends = [line.of("peer_finished")[0] for line in lines]
    assert {(end["reason"], end["round"]) for end in ends} == {("target", ends[0]["round"])}


@pytest.mark.parametrize("name", ["ddp", "local-sgd"])
def test_it_fails_when_a_member_is_gone(name: str, server: str, tmp_path: Path) -> None:
    swarm = {"target_batch_size": 32, "batch_size": 8}
    lines = start_swarm(server, members(name, 2, swarm=swarm), tmp_path)
    lines[1].wait_for("evaluation")
    kill_groups(lines[0].pid)
    while not lines[1].of("peer_failed"):
        lines[1].read(60, "peer_failed")
    assert "another member is gone" in lines[1].of("peer_failed")[0]["error"]


def test_a_single_device_trains_on_the_best_node_while_the_others_wait(
    server: str, tmp_path: Path
) -> None:
    classes = {"slow": {"count": 1, "cpu_share": 0.5}, "fast": {"count": 2, "cpu_share": 2.0}}
    swarm = {"target_batch_size": 100, "batch_size": 8, "node_classes": classes}
    lines = start_swarm(server, members("single", 3, swarm=swarm, samples=416), tmp_path)
    lines[1].wait_for("peer_finished")
    for waiting in (lines[0], lines[2]):
        waiting.command("stop", reason="rounds")
    finish_swarm(lines)
    # 13 batches of 8 are the first 104 samples that reach the target
    assert [event["samples"] for event in lines[1].of("round")] == [104] * 4
    assert {event["sent_bytes"] for event in lines[1].of("round")} == {0}
    for waiting in (lines[0], lines[2]):
        assert not waiting.of("round")
        assert waiting.of("peer_finished")[0]["samples"] == 0


@pytest.mark.slow
def test_hivemind_trains_alone_until_it_sees_the_others_and_counts_no_bytes(
    server: str, tmp_path: Path
) -> None:
    # hivemind may wait for the whole averaging_timeout as the peers come to see each other
    limits = {"matchmaking_time": 1.0, "averaging_timeout": 10.0}
    swarm = {"target_batch_size": 16384, "batch_size": 32, **limits}
    lines = start_swarm(server, members("hivemind", 2, swarm=swarm), tmp_path)
    for line in lines:
        while all(event["outcome"] != "averaged" for event in line.of("round")):
            line.read(60, "round")
    for line in lines:
        line.command("stop", reason="target")
    finish_swarm(lines)
    for line in lines:
        rounds = line.of("round")
        assert {event["group_size"] for event in rounds if event["outcome"] == "averaged"} == {2}
        assert all("sent_bytes" not in event for event in rounds)
        (end,) = line.of("peer_finished")
        dropped = sum(event["lost"] for event in line.of("state_loaded"))
        used = sum(event["samples"] + event["lost"] for event in rounds)
        assert end["samples"] == used + dropped + end["pending"]
        # requests that outlast the matchmaking let peers wait for each other until a timeout
        assert "request_timeout smaller" not in line.log.read_text()
