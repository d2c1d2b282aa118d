"""Real peers that join, leave and lose processes: no other peer hangs or is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peer,
    finish_swarm,
    kill_groups,
    read_any,
    start_swarm,
)

pytestmark = [pytest.mark.swarm]

TARGET = 128
#: A peer that waited for one of these would fail by LIMIT.
WINDOW, LIMIT = 90.0, 60.0


def spec(run_id: str, peer: int, peers: int, **configuration: Any) -> PeerSpec:
    swarm = {"target_batch_size": TARGET, "batch_size": 32}
    times = {"matchmaking_time": WINDOW, "averaging_timeout": 2 * WINDOW}
    return digits_peer(
        run_id,
        peer,
        peers,
        swarm={**swarm, **times},
        configuration=configuration,
        evaluate_every=100 * TARGET,
    )


def listen(lines: list[PeerLine], until: Callable[[], bool]) -> None:
    """Read what the peers say until something holds."""
    deadline = time.monotonic() + LIMIT
    while not until():
        read_any(lines, deadline - time.monotonic(), "such event")


def rounds(line: PeerLine, after: float = 0.0, **fields: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in line.of("round")
        if event["t"] > after and all(event.get(key) == value for key, value in fields.items())
    ]


def stop(lines: list[PeerLine]) -> None:
    for line in lines:
        line.command("stop", reason="enough")
    listen(lines, lambda: all(line.of("peer_finished") for line in lines))
    finish_swarm(lines)


def of_peer(line: PeerLine, name: str) -> psutil.Process:
    """Return one of the processes that a peer consists of."""
    tree = psutil.Process(line.pid).children(recursive=True)
    daemon = next(process for process in tree if "p2pd" in process.name())
    if name == "network daemon":
        return daemon
    dht = daemon.parent()
    assert dht is not None
    if name == "DHT":
        return dht
    return max(averagers(line), key=lambda process: process.create_time())


def averagers(line: PeerLine) -> list[psutil.Process]:
    """Return the processes of a peer's averagers."""
    tree = psutil.Process(line.pid).children(recursive=True)
    daemon = next(process for process in tree if "p2pd" in process.name())
    dht = daemon.parent()
    forks = [p for p in tree if p.ppid() == line.pid and p != dht and "p2pd" not in p.name()]
    return [p for p in forks if "resource_tracker" not in " ".join(p.cmdline())]


@pytest.mark.parametrize("delay", [pytest.param("none", marks=pytest.mark.slow), "gradients"])
def test_a_swarm_follows_deaths_and_joins_down_to_one_and_up_again(
    socket_path: str, tmp_path: Path, delay: str
) -> None:
    run_id = f"tide-{delay}"
    lines = start_swarm(
        socket_path, [spec(run_id, peer, 4, delay=delay) for peer in range(4)], tmp_path
    )
    listen(lines, lambda: all(len(rounds(line, group_size=4)) >= 3 for line in lines))

    victim, *lines = lines  # the oldest: it leads, and is the bootstrap peer
    killed = kill_groups(victim.pid)
    listen(lines, lambda: all(len(rounds(line, killed, group_size=3)) >= 3 for line in lines))

    *victims, survivor = lines
    killed = kill_groups(*(victim.pid for victim in victims))
    listen([survivor], lambda: len(rounds(survivor, killed, outcome="alone")) >= 5)

    joiner = PeerLine(socket_path, spec(run_id, 4, 1, delay=delay), tmp_path / "joiner.log")
    joiner.command("start", initial_peers=survivor.of("dht_ready")[0]["addresses"])
    lines = [survivor, joiner]
    listen(lines, lambda: bool(joiner.of("peer_ready")))
    joiner.command("train")
    joined = time.time()
    listen(lines, lambda: all(len(rounds(line, joined, group_size=2)) >= 4 for line in lines))
    assert rounds(joiner)[0]["round"] > rounds(survivor)[0]["round"], "it went on from the others"
    assert_equal_weights(lines)
    stop(lines)


def assert_equal_weights(lines: list[PeerLine]) -> None:
    """Compare the newest weights that all peers have reported."""
    told = [{event["round"]: event for event in line.of("weights")} for line in lines]
    newest = max(set(told[0]).intersection(*told[1:]))
    first, *others = (events[newest] for events in told)
    for other in others:
        assert first.distance(other) < 1e-5, f"round {newest}"


@pytest.mark.parametrize("name", ["averager", "DHT", "network daemon"])
def test_a_peer_that_lost_a_process_ends_with_its_name_and_the_other_goes_on(
    socket_path: str, tmp_path: Path, name: str
) -> None:
    run_id = f"loss-{name.replace(' ', '-')}"
    lines = start_swarm(socket_path, [spec(run_id, peer, 2) for peer in range(2)], tmp_path)
    listen(lines, lambda: all(len(rounds(line, group_size=2)) >= 3 for line in lines))
    broken, survivor = lines
    of_peer(broken, name).kill()
    killed = time.time()
    listen(lines, lambda: bool(broken.of("peer_failed")))
    error = broken.of("peer_failed")[0]["error"]
    assert "PeerProcessDied" in error and "died" in error, error
    assert {"averager": "averager", "DHT": "DHT", "network daemon": "p2pd"}[name] in error
    listen(lines, lambda: bool(broken.of("exited")))
    assert broken.of("exited")[0]["exit_code"] != 0
    listen([survivor], lambda: len(rounds(survivor, killed, outcome="alone")) >= 3)
    stop([survivor])


def test_a_peer_that_is_stopped_lets_the_others_go_on_at_once(
    socket_path: str, tmp_path: Path
) -> None:
    lines = start_swarm(socket_path, [spec("leaving", peer, 3) for peer in range(3)], tmp_path)
    listen(lines, lambda: all(len(rounds(line, group_size=3)) >= 2 for line in lines))
    leaving, *staying = lines
    leaving.command("stop", reason="enough")
    listen(lines, lambda: bool(leaving.of("peer_finished")))
    left = time.time()
    listen(lines, lambda: all(len(rounds(line, left, group_size=2)) >= 3 for line in staying))
    for line in staying:
        assert {event["outcome"] for event in rounds(line)} == {"averaged"}
        assert not line.of("fallback")
    stop(staying)
    finish_swarm([leaving])
