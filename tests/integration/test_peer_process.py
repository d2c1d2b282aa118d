"""Real peer processes: a small swarm from start to end, and a killed peer."""

from __future__ import annotations

import math
import os
import signal
import time
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from rayhive.peer.priority import NICER
from rayhive.spec import WorkloadConfig
from rayhive.spec.axes.delay import DelayName
from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peers,
    finish_swarm,
    start_swarm,
)

pytestmark = [pytest.mark.swarm]

ROUNDS = 6
TARGET = 128


def specs(run_id: str, peers: int = 2, rounds: int = ROUNDS, **settings: object) -> list[PeerSpec]:
    swarm = {"target_batch_size": TARGET, "batch_size": 32}
    return digits_peers(
        run_id,
        peers,
        swarm=swarm,
        configuration=settings,
        evaluate_every=3 * TARGET,
        seconds=60,
        samples=rounds * TARGET,
    )


def assert_rounds_are_whole(lines: list[PeerLine], rounds: int = ROUNDS) -> None:
    for number in range(1, rounds + 1):
        events = [e for line in lines for e in line.of("round") if e["round"] == number]
        assert len(events) == len(lines), lines[0].story()
        assert {e["outcome"] for e in events} == {"averaged"}, lines[0].story()
        assert {e["group_size"] for e in events} == {len(lines)}
        assert sum(e["samples"] for e in events) >= TARGET
        # the payload of a round is a fixed number of bytes, whichever peer reduced a part
        predicted = lines[0].of("peer_ready")[0]["predicted_payload_bytes_per_round"]
        sent = Fraction(sum(e["sent_bytes"] for e in events)) / len(lines)
        assert sent == Fraction(predicted)


def assert_replicas_agree(lines: list[PeerLine], tolerance: float) -> None:
    weights = [{e["round"]: e for e in line.of("weights")} for line in lines]
    for a, b in combinations(weights, 2):
        assert a.keys() == b.keys() and len(a) == ROUNDS
        for round_ in a:
            distance = a[round_].distance(b[round_])
            assert distance <= tolerance, f"round {round_}: {distance}"


def assert_samples_are_conserved(line: PeerLine) -> None:
    """Every sample that a peer had computed when a round ended is in a round."""
    entered = 0
    transitions = {e["round"]: e for e in line.of("transition")}
    for event in sorted(line.of("round"), key=lambda event: int(event["round"])):
        entered += event["samples"]
        assert event["computed"] == transitions[event["round"]]["computed"] == entered


def assert_processes_are_named(line: PeerLine) -> None:
    roles = {"trainer", "dht", "p2pd", "gradient_averager", "state_averager"}
    (ready,) = line.of("peer_ready")
    assert ready["processes"].keys() == roles and ready["processes"]["trainer"] == line.pid
    assert len(set(ready["processes"].values())) == len(roles)


@pytest.mark.parametrize("delay", ["none", "state", "optimizer", "gradients"])
def test_two_peers_train_together_in_every_delay_mode(
    socket_path: str, tmp_path: Path, delay: DelayName
) -> None:
    lines = start_swarm(socket_path, specs(f"delay-{delay}", delay=delay), tmp_path)
    finish_swarm(lines)
    assert_rounds_are_whole(lines)
    assert_replicas_agree(lines, tolerance=1e-5)
    for line in lines:
        assert_samples_are_conserved(line)
        assert_processes_are_named(line)
        finished = line.of("peer_finished")[0]
        assert finished["reason"] == "rounds" and finished["round"] == ROUNDS
        losses = [e["values"]["loss"] for e in line.of("evaluation")]
        assert len(losses) >= 2 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "uniform8"},
        {"codec": "size_adaptive", "threshold": 1024},
        {"powersgd_rank": 2, "min_compression_ratio": 0.2},
    ],
    ids=str,
)
def test_compressed_rounds_send_the_predicted_bytes(
    socket_path: str, tmp_path: Path, settings: dict[str, object]
) -> None:
    lines = start_swarm(
        socket_path,
        specs("-".join(map(str, settings.values())).replace(".", "_"), **settings),
        tmp_path,
    )
    finish_swarm(lines)
    assert_rounds_are_whole(lines)
    assert_replicas_agree(lines, tolerance=1e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"codec": "uniform8", "error_feedback": True},
        {"powersgd_rank": 2, "min_compression_ratio": 0.2},
        {"delay": "gradients"},
    ],
    ids=str,
)
def test_batch_norm_sends_its_statistics_with_the_gradients_and_no_parameters(
    socket_path: str, tmp_path: Path, settings: dict[str, object]
) -> None:
    workload = WorkloadConfig(import_path="tests.fixtures.normed:Normed")
    name = "-".join(["normed", *map(str, settings.values())]).replace(".", "_")
    peers = [each.model_copy(update={"workload": workload}) for each in specs(name, **settings)]
    lines = start_swarm(socket_path, peers, tmp_path)
    finish_swarm(lines)
    assert_rounds_are_whole(lines)
    assert_replicas_agree(lines, tolerance=1e-5)
    assert {event["reason"] for line in lines for event in line.of("state_round")} <= {"joined"}
    for line in lines:
        (ready,) = line.of("peer_ready")
        parameters = sum(math.prod(shape) for shape in ready["shapes"])
        assert ready["dense_payload_bytes"] == 4 * (parameters + 2 * 64)
        losses = [e["values"]["loss"] for e in line.of("evaluation")]
        assert losses[-1] < losses[0]


def test_a_killed_peer_leaves_no_process_and_is_reported(socket_path: str, tmp_path: Path) -> None:
    lines = start_swarm(socket_path, specs("killed", rounds=10_000), tmp_path)
    victim, survivor = lines
    tree = [psutil.Process(victim.pid), *psutil.Process(victim.pid).children(recursive=True)]
    assert any("p2pd" in process.name() for process in tree)
    os.kill(victim.pid, signal.SIGKILL)
    exited = exit_of(victim)
    assert exited["exit_code"] == -signal.SIGKILL
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert not alive, alive
    # the actor's death ends its peer: the connection closes
    tree = [psutil.Process(survivor.pid), *psutil.Process(survivor.pid).children(recursive=True)]
    survivor.close()
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert not alive, alive


def test_peers_that_train_yield_to_one_that_starts(socket_path: str, tmp_path: Path) -> None:
    before = psutil.Process().nice()
    lines = start_swarm(socket_path, specs("yields", rounds=10_000), tmp_path)
    for line in lines:
        line.wait_for("weights")  # after the first round
        processes = [psutil.Process(line.pid), *psutil.Process(line.pid).children(recursive=True)]
        assert len(processes) >= 5
        assert {process.nice() for process in processes} == {min(before + NICER, 19)}
    joiner = PeerLine(socket_path, specs("yields", peers=3)[2], tmp_path / "joiner.log")
    assert psutil.Process(joiner.pid).nice() == before


def exit_of(line: PeerLine) -> dict[str, object]:
    deadline = time.monotonic() + 10
    while not line.of("exited"):
        line.read(deadline - time.monotonic(), "exited")
    return line.of("exited")[0]


def test_a_failing_workload_ends_in_a_named_error(socket_path: str, tmp_path: Path) -> None:
    (spec,) = specs("broken", peers=1)
    broken = spec.model_copy(update={"workload": WorkloadConfig(name="digits", args={"widht": 3})})
    line = PeerLine(socket_path, broken, tmp_path / "log")
    with pytest.raises(AssertionError, match="widht"):
        line.wait_for("dht_ready")
    assert exit_of(line)["exit_code"] == 1


def test_a_stop_ends_training_at_the_next_batch(socket_path: str, tmp_path: Path) -> None:
    lines = start_swarm(socket_path, specs("stopped", rounds=10_000), tmp_path)
    for line in lines:
        line.command("stop", reason="time is up")
    finish_swarm(lines)
    assert {line.of("peer_finished")[0]["reason"] for line in lines} == {"time is up"}
