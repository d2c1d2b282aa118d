"""A peer joins a run, and all others die: the trained state goes on with it, or the run says no."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peer,
    finish_swarm,
    kill_groups,
    start_swarm,
)
from tests.integration.test_liveness import averagers, listen, rounds

pytestmark = [pytest.mark.swarm]

#: Rounds of the others before the new peer begins.
TRAINED = 20


def spec(run_id: str, peer: int, peers: int, **configuration: Any) -> PeerSpec:
    swarm = {"target_batch_size": 128, "batch_size": 32, "averaging_timeout": 6.0}
    swarm |= {"matchmaking_time": 3.0}
    return digits_peer(
        run_id, peer, peers, swarm=swarm, configuration=configuration, evaluate_every=10**6
    )


def join(
    socket_path: str,
    folder: Path,
    configuration: dict[str, Any],
    *,
    moment: str = "peer_ready",
    suspended: bool = False,
) -> list[PeerLine]:
    """Return a new peer that is starting, and two peers that have trained for a while.

    Args:
        moment: Event of the new peer up to which it has come.
        suspended: Suspend the averagers of these before the new one starts: none sends its state.
    """
    run_id = "alone-" + "-".join(map(str, configuration.values()))
    specs = [spec(run_id, peer, 2, **configuration) for peer in range(2)]
    others = start_swarm(socket_path, specs, folder)
    listen(others, lambda: all(len(rounds(line)) >= TRAINED for line in others))
    for process in (each for line in others for each in averagers(line) if suspended):
        process.suspend()
    joiner = PeerLine(socket_path, spec(run_id, 2, 1, **configuration), folder / "joiner.log")
    joiner.command("start", initial_peers=others[0].of("dht_ready")[0]["addresses"])
    listen([joiner, *others], lambda: bool(joiner.of(moment)))
    return [joiner, *others]


def kill(others: list[PeerLine]) -> None:
    kill_groups(*(line.pid for line in others))
    for line in others:
        while not line.of("exited"):
            line.read(10.0, "exited")
        line.connection.close()


def test_a_peer_without_the_state_does_not_begin_the_run_anew(
    socket_path: str, tmp_path: Path
) -> None:
    joiner, *others = join(socket_path, tmp_path, {}, suspended=True)
    joiner.command("train")
    deadline = time.monotonic() + 30.0
    while "could not download the state" not in joiner.log.read_text():
        assert time.monotonic() < deadline, joiner.story()
        time.sleep(0.05)
    kill(others)
    assert_says_no(joiner)


def assert_says_no(joiner: PeerLine) -> None:
    """Check that a peer ends without a round, and says that the state is lost."""
    listen([joiner], lambda: bool(joiner.of("exited")))
    (failed,) = joiner.of("peer_failed")
    assert "the state of the run is lost" in failed["error"], failed
    assert not [event for event in joiner.of("round") if event["samples"]]
    assert joiner.of("exited")[0]["exit_code"] != 0
    joiner.connection.close()


CONFIGURATIONS = [
    pytest.param({}, id="rounds"),
    pytest.param({"local_steps": 4}, id="local_steps", marks=pytest.mark.slow),
    pytest.param({"local_steps": 4, "fragments": 4}, id="fragments", marks=pytest.mark.slow),
    pytest.param({"codec": "topk", "error_feedback": True}, id="topk", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(
    "moment",
    [
        "dht_ready",
        pytest.param("peer_ready", marks=pytest.mark.slow),
        "state_loaded",
        pytest.param("round", marks=pytest.mark.slow),
    ],
)
def test_a_peer_left_alone_has_the_trained_state_or_says_no(
    socket_path: str, tmp_path: Path, moment: str, configuration: dict[str, Any]
) -> None:
    """It downloads the state between ``dht_ready`` and ``peer_ready``, and then waits to train."""
    trains = moment not in ("dht_ready", "peer_ready")
    joiner, *others = join(
        socket_path, tmp_path, configuration, moment="peer_ready" if trains else moment
    )
    if trains:
        joiner.command("train")
        listen([joiner, *others], lambda: bool(joiner.of(moment)))
    kill(others)
    if moment == "dht_ready":
        listen([joiner], lambda: bool(joiner.of("peer_ready") or joiner.of("exited")))
    if joiner.of("exited"):
        assert moment == "dht_ready"
        assert_says_no(joiner)
        return
    if not trains:
        joiner.command("train")
    listen([joiner], lambda: len(rounds(joiner, outcome="alone")) >= 3)
    joiner.command("stop", reason="enough")
    finish_swarm([joiner])
    joiner.connection.close()
    first, trained = others[0].of("weights")[0], others[0].of("weights")[-1]
    after = next(event for event in joiner.of("weights") if event["round"] >= trained["round"])
    assert after.distance(trained) < 0.2 * after.distance(first)
