"""Replicates of two sweeps on one cluster: apart by default, recorded where they share nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rayhive.events import NodesShared, PeerSpawned, Round, of_kind
from rayhive.spec.replicate import ReplicateSpec
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    Head,
    driver,
    events_of,
    eventually,
    ray_head,
    ray_node,
    replicate,
    training,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

START = """
import json, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
from rayhive.cluster.cluster import Cluster
from rayhive.spec.replicate import ReplicateSpec
address, spec, forkserver = sys.argv[1], ReplicateSpec.model_validate_json(sys.argv[2]), sys.argv[3]
with Cluster.connect(address, forkserver_command=json.loads(forkserver)) as cluster:
    print("room", cluster.at_once(spec.swarm), flush=True)
    handle = cluster.start(spec)
    print("started", flush=True)
    signal.sigwait([signal.SIGUSR1])
    handle.stop("the test is over")
    print("state", handle.wait(60).state, flush=True)
    handle.release()
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    with ray_head(folder) as head:
        yield head


class Sweep:
    """Driver of one endless replicate of one peer, in a process of its own.

    Attributes:
        spec: The replicate.
        room: How many replicates like it have room at once, as its driver found.
    """

    def __init__(self, head: Head, spec: ReplicateSpec, opened: ExitStack) -> None:
        self.spec = spec
        arguments = (head.address, spec.model_dump_json(by_alias=True))
        self._driver = opened.enter_context(
            driver(START, *arguments, json.dumps(FAKE_FORKSERVER), **head.environment)
        )
        self.room = int(self._driver.line("room"))
        self._driver.line("started")

    def node(self) -> str:
        """Wait until it trains; return Ray's id of its node."""
        eventually(lambda: training(self.spec), 60.0)
        return next(of_kind(events_of(self.spec), PeerSpawned)).node

    def trains_on(self) -> None:
        """Wait until it has trained for many more rounds."""

        def rounds() -> int:
            return len(list(of_kind(events_of(self.spec), Round)))

        before = rounds()
        eventually(lambda: rounds() > before + 100, 60.0)

    def waits(self) -> bool:
        """Return whether it is placed nowhere."""
        return not list(of_kind(events_of(self.spec), PeerSpawned))

    def beside(self) -> list[str]:
        """Return the replicates that it has seen on its node."""
        return [
            run for event in of_kind(events_of(self.spec), NodesShared) for run in event.replicates
        ]

    def end(self) -> None:
        """Stop it."""
        process = self._driver.process
        os.kill(process.pid, signal.SIGUSR1)
        assert self._driver.line("state") == "stopped"
        assert process.wait(60) == 0


def endless(folder: Path, study: str, **swarm: object) -> ReplicateSpec:
    budget = {"seconds_per_replicate": 300}
    swarm = {"peers": 1, **swarm}
    return replicate(folder / study, study=study, rounds=None, budget=budget, swarm=swarm)


def test_replicates_of_two_sweeps_have_their_nodes_to_themselves(
    head: Head, folder: Path, tmp_path: Path
) -> None:
    with ExitStack() as opened:
        first = Sweep(head, endless(tmp_path, "first"), opened)
        assert first.room == 1
        home = first.node()
        second = Sweep(head, endless(tmp_path, "second"), opened)
        first.trains_on()
        assert second.waits()  # there are cores for both
        with ray_node(head, folder, ["--node-ip-address=127.0.0.2", "--num-cpus=4"]):
            away = second.node()
            assert away != home
            third = Sweep(head, endless(tmp_path, "third", share_nodes=True), opened)
            assert third.room == 8
            first.trains_on()
            assert third.waits()
            second.end()
            assert third.node() == away
            third.end()
        first.end()
        assert first.beside() == second.beside() == third.beside() == []


def test_replicates_that_share_a_node_record_each_other(head: Head, tmp_path: Path) -> None:
    with ExitStack() as opened:
        early = Sweep(head, endless(tmp_path, "early", share_nodes=True), opened)
        home = early.node()
        late = Sweep(head, endless(tmp_path, "late", share_nodes=True), opened)
        assert late.node() == home
        eventually(early.beside)
        late.end()
        early.end()
        assert early.beside() == [late.spec.run_id]
        assert late.beside() == [early.spec.run_id]
