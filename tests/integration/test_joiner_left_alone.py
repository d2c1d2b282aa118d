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
from tests.integration.swarm_helpers import call
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
    suspended: bool = False,
) -> list[PeerLine]:
    """Return a new peer that is ready to train, and two peers that have trained for a while.

    Args:
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
    listen([joiner, *others], lambda: bool(joiner.of("peer_ready")))
    return [joiner, *others]


def kill(others: list[PeerLine]) -> None:
    kill_groups(*(line.pid for line in others))
    for line in others:
        while not line.of("exited"):
            line.read(10.0, "exited")
        line.close()


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
    listen([joiner], lambda: bool(joiner.of("exited")))
    (failed,) = joiner.of("peer_failed")
    assert "the state of the run is lost" in failed["error"], failed
    assert not [event for event in joiner.of("round") if event["samples"]]
    assert joiner.of("exited")[0]["exit_code"] != 0
    joiner.close()


def trains(folder: str) -> None:
    """Train alone for long."""
    from rayhive import HivemindStrategy
    from tests.integration.toy import ALONE, Regression, UntilRound, loader, share_address, trainer

    strategy = HivemindStrategy(**ALONE)
    share_address(strategy, Path(folder))
    shown = UntilRound(10**6, at_round=lambda _: print("trained", flush=True))
    trainer(strategy, shown).fit(Regression(), loader())


def joins(folder: str, other: int, known: bool) -> str:
    """Join the run of a peer that dies at once; return the error.

    Args:
        folder: Folder with the address of the other peer.
        other: Its process group.
        known: Whether the DHT of this peer was told of the run when the two met.
    """
    import os
    import select
    import signal

    from rayhive import HivemindStrategy
    from rayhive.cluster.node.process_group import OwnedProcesses
    from rayhive.errors import PeerError
    from rayhive.strategy.dht import SwarmDHT
    from tests.integration.toy import ALONE, Regression, UntilRound, address_in, loader, trainer

    look = SwarmDHT._shared_rounds

    def too_late(dht: SwarmDHT) -> dict[bytes, float]:
        SwarmDHT._shared_rounds = look  # type: ignore[method-assign]
        # the entry may be that of the start, which is replaced after a while
        shared = {peer: max(round_, 1.0) for peer, round_ in look(dht).items()}
        owned = OwnedProcesses(leader=other)
        owned.note()
        group = [os.pidfd_open(pid) for pid in owned.living()]
        os.killpg(other, signal.SIGKILL)
        for process in group:
            assert select.select([process], [], [], 10.0)[0], "it did not end"
            os.close(process)
        owned.remove()
        return shared if known else {}

    SwarmDHT._shared_rounds = too_late  # type: ignore[method-assign]
    with pytest.raises(PeerError) as found:
        strategy = HivemindStrategy(**ALONE, initial_peers=address_in(Path(folder)))
        trainer(strategy, UntilRound(10**6)).fit(Regression(), loader())
    return str(found.value)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("known", "text"),
    [
        pytest.param(True, "the state of the run is lost", marks=pytest.mark.slow),
        (False, "died while this one"),
    ],
)
def test_a_peer_that_met_the_others_just_before_they_died_does_not_begin_anew(
    tmp_path: Path, known: bool, text: str
) -> None:
    first = call(trains, folder=str(tmp_path))
    first.wait_for_line("trained")
    assert text in call(joins, folder=str(tmp_path), other=first.pid, known=known).result()


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
        pytest.param("peer_ready", marks=pytest.mark.slow),
        "state_loaded",
        pytest.param("round", marks=pytest.mark.slow),
    ],
)
def test_a_peer_with_the_state_goes_on_from_it(
    socket_path: str, tmp_path: Path, moment: str, configuration: dict[str, Any]
) -> None:
    """At ``peer_ready`` it has downloaded the state, and waits for the command to train."""
    joiner, *others = join(socket_path, tmp_path, configuration)
    if moment == "peer_ready":
        kill(others)
    joiner.command("train")
    if moment != "peer_ready":
        listen([joiner, *others], lambda: bool(joiner.of(moment)))
        kill(others)
    listen([joiner], lambda: len(rounds(joiner, outcome="alone")) >= 3)
    joiner.command("stop", reason="enough")
    finish_swarm([joiner])
    joiner.close()
    # its first ones: it trains on alone until the command to stop arrives
    after, (first, *later) = joiner.of("weights")[0], others[0].of("weights")
    nearest = min(after.distance(trained) for trained in later[TRAINED // 2 :])
    assert nearest < 0.2 * after.distance(first), joiner.story()
