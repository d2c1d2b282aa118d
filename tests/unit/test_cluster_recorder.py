"""Intake of a replicate: items of the peers' streams become events and states."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rayhive.cluster.live_metrics import ReplicateMetrics, plain_labels
from rayhive.cluster.replicate.early_stop import EarlyStopWatch
from rayhive.cluster.replicate.peer_actor import Exited, StreamItem, Unreadable
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.recorder import Recorder, ReplicateLog
from rayhive.cluster.replicate.waiter import StopRequested, Waiter
from rayhive.events import PeerFinished, PeerLost, Progress, TrainingStarted, read_events
from tests.fixtures.logs import make_spec


class Intake:
    """A recorder of two peers that writes to a folder."""

    def __init__(self, folder: Path) -> None:
        self.waiter = Waiter()
        self.log = ReplicateLog(make_spec(folder=str(folder)), self.waiter.changed)
        self.log.open()
        self.table = PeerTable(["peer-0", "peer-1"])
        for number, name in enumerate(self.table.peers):
            self.table.spawned(name, 100 + number, "host")
        watch = EarlyStopWatch(make_spec(), self.table.training, self.waiter.stop)
        self.recorder = Recorder(
            self.log, self.table, self.waiter.changed, watch, ReplicateMetrics(make_spec())
        )

    def receive(self, name: str, *items: StreamItem) -> None:
        for item in items:
            asyncio.run(self.recorder.receive(name, item))


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    made = Intake(tmp_path)
    (tmp_path / "logs" / "peer-1.log").write_text("the last words\n")
    return made


def test_an_event_is_written_with_the_name_of_its_peer(intake: Intake) -> None:
    intake.receive("peer-1", TrainingStarted(), Progress(computed=8))
    assert [event.peer for event in read_events(intake.log.path)] == ["peer-1", "peer-1"]
    assert intake.table.peers["peer-1"].state == "training"


def test_an_event_that_cannot_be_read_is_trouble(intake: Intake) -> None:
    intake.receive("peer-0", Unreadable("round: samples: Field required"))
    assert intake.table.trouble() == (
        "peer-0: it sent an event that can't be read: round: samples: Field required"
    )


def test_an_event_that_cannot_be_taken_in_is_trouble(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error on the way to the disk or to a metric must not silence a peer."""

    def fail(*_: object) -> None:
        raise UnicodeEncodeError("ascii", "≥", 0, 1, "ordinal not in range")

    monkeypatch.setattr(ReplicateMetrics, "heard", fail)
    intake.receive("peer-0", TrainingStarted())
    assert (intake.table.trouble() or "").startswith(
        "peer-0: its event training_started can't be taken in: UnicodeEncodeError"
    )
    log = intake.log.path.parent / "logs" / "supervisor.log"
    assert "Traceback" in log.read_text()


def test_a_death_is_a_loss_unless_the_peer_had_finished(intake: Intake) -> None:
    intake.receive("peer-0", PeerFinished(reason="rounds", round=4, samples=32), Exited(0))
    assert intake.table.trouble() is None
    intake.receive("peer-1", Exited(-9))
    assert intake.table.trouble() == (
        "peer-1: its process was killed by signal 9; its log ends with: the last words"
    )
    lost = list(read_events(intake.log.path))[-1]
    assert isinstance(lost, PeerLost)
    assert (lost.peer, lost.exit_code) == ("peer-1", -9)
    assert lost.reason == "its process was killed by signal 9"


def test_the_log_of_a_peer_on_another_node_comes_with_its_end(intake: Intake) -> None:
    intake.receive("peer-0", Exited(-9, last_lines="written elsewhere"))
    assert intake.table.trouble() == (
        "peer-0: its process was killed by signal 9; its log ends with: written elsewhere"
    )


def test_a_peer_whose_actor_is_gone_has_no_last_lines_if_its_log_is_elsewhere(
    intake: Intake,
) -> None:
    intake.receive("peer-0", Exited(reason="its actor died"))
    assert intake.table.trouble() == "peer-0: its actor died"


def test_the_exit_of_a_peer_that_was_asked_to_is_no_loss(intake: Intake) -> None:
    intake.recorder.shutting_down = True
    intake.receive("peer-0", Exited(-9))
    assert intake.table.trouble() is None and len(list(read_events(intake.log.path))) == 0


def test_a_request_to_stop_ends_a_step() -> None:
    ended: list[str] = []

    async def step() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("step")

    async def body() -> None:
        waiter = Waiter()
        asyncio.get_running_loop().call_later(0.01, waiter.stop, "by hand")
        asyncio.get_running_loop().call_later(0.02, waiter.stop, "too late")
        with pytest.raises(StopRequested, match="by hand"):
            await waiter.unless_stopped(step())
        await asyncio.sleep(0)
        assert ended == ["step"]

    asyncio.run(body())


def test_a_condition_is_checked_after_each_change_and_at_the_deadline() -> None:
    async def body() -> None:
        loop, waiter, seen = asyncio.get_running_loop(), Waiter(), []

        def reached() -> bool:
            seen.append(loop.time())
            loop.call_later(0.01, waiter.changed)  # changes before a check would be one
            return len(seen) == 3

        assert await waiter.until(reached, deadline(60.0))
        assert not await waiter.until(lambda: False, deadline(0.01))

    asyncio.run(body())


def deadline(seconds: float) -> float:
    return time.monotonic() + seconds


def test_labels_of_metrics_are_in_ascii() -> None:
    """Ray refuses others, and the names of configurations with PowerSGD have one."""
    found = plain_labels({"configuration": "none rank1(≥0.5)"}, {"peer": "peer-0", "study": "é"})
    assert found == {"configuration": "none rank1(>=0.5)", "peer": "peer-0", "study": "?"}
