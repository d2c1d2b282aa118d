"""Signals and requests that end a running sweep, and its resumption."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import finished_event
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import FakeCluster, Recorder, World
from tests.unit.test_sweep_driver import journalled, make_study, sweep


class Signalling(Recorder):
    """Sends signals to its own process while a replicate runs."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def replicate_status(self, spec: ReplicateSpec, handle: Any) -> None:
        super().replicate_status(spec, handle)
        if self.numbers:
            signal.raise_signal(self.numbers.pop(0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_replicate_and_the_next_run_resumes(
    run_dir: Path, number: signal.Signals
) -> None:
    study, world = journalled(make_study(), run_dir), World(looks=3)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name) as caught, Interruption() as interruption:
        run_sweep(
            study,
            run_dir,
            Signalling(number),
            interruption,
            target=target_at(connect=world.connect),
        )
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before
    assert not world.live and world.closed == 1 and len(world.released) == 1
    (first,) = world.starts
    trial, replicate, _ = first.split("/")
    assert finished_event(run_dir / f"trials/{trial}/r{replicate}-none") is None

    done, progress = sweep(study, run_dir, world)
    assert done.trials == 3
    assert progress.of("started")[0] == (first, 1, False)
    assert world.starts[first] == 2 and sum(world.starts.values()) == 7


class Stubborn(FakeCluster):
    """A cluster whose replicates do not end on request."""

    def start(self, spec: ReplicateSpec) -> Any:
        handle = super().start(spec)
        handle.stop = lambda reason: signal.raise_signal(signal.SIGINT)
        return handle


def test_a_second_signal_does_not_wait(run_dir: Path) -> None:
    study, world = journalled(make_study(), run_dir), World(looks=10**6)
    progress = Signalling(signal.SIGINT)

    @contextmanager
    def connect(address: str | None) -> Iterator[Stubborn]:
        yield Stubborn(world)
        world.closed += 1

    with pytest.raises(Interrupted), Interruption() as interruption:
        run_sweep(study, run_dir, progress, interruption, target_at(connect=connect))
    assert len(world.released) == 1


def test_a_signal_between_replicates_raises_at_once() -> None:
    with Interruption() as interruption:
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.signal_number == signal.SIGTERM
        with pytest.raises(Interrupted):
            interruption.check()


def test_stopping_from_outside_ends_the_sweep(run_dir: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, state="stopped" if spec.trial else "completed")

    with pytest.raises(Interrupted, match="stopped from outside: rounds") as caught:
        sweep(make_study(), run_dir, World(log=log))
    assert caught.value.exit_code == 1
