"""A driver that is killed anywhere loses nothing.

Its lines are traced, and what it left behind (trials, files, supervisors) is compared after each
one: a kill between two lines that change nothing outside the driver is the same kill. It is tried
at every point at which something has changed, with each fate that the supervisor may then have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import pytest

from rayhive import files
from rayhive.metrics.rows import Codes
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep import driver, replicate_runner, trial_book
from rayhive.sweep.attempts import finished_event
from rayhive.sweep.driver import Driver
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.samplers import make_sampler
from rayhive.sweep.signals import Interruption
from rayhive.sweep.space import SearchSpace
from rayhive.sweep.storage import open_study
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from rayhive.sweep.trial_book import TrialBook
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import SHAPES, FakeCluster, Killed, Recorder, World

TRACED = {module.__file__ for module in (driver, files, replicate_runner, trial_book)}

CONFIG = SweepConfig(
    name="study",
    workload={"name": "digits"},
    # The second is the first under another name; after them one trial is sampled.
    enqueue=[
        Configuration(codec="float16"),
        Configuration(codec="size_adaptive", threshold=10**6),
    ],
    space={"codec": ["none", "float16", "uniform8", "quantile8"]},
    replicates=2,
    budget={"trials": 2, "seconds_per_replicate": 30},
)
STUDY = resolve(CONFIG, workload=WorkloadFacts(SHAPES, 32, "real"))


class Trap:
    """Kills the driver at the ``at``-th line of its own code, or calls ``watch`` at each line."""

    def __init__(self, at: int | None = None, watch: Callable[[int], None] | None = None) -> None:
        self.at = at
        self.watch = watch
        self.lines = 0
        self.sprung = False

    def tick(self) -> None:
        """Refuse to clean up, which a dead driver cannot do."""
        if self.sprung:
            raise Killed

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.watch is not None:
                self.watch(self.lines)
            if self.lines == self.at:
                self.sprung = True
                raise Killed
        return self._line

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in TRACED else None

    def spring(self, action: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return action()
        finally:
            sys.settrace(before)


class Witness(Recorder):
    """Checks that a finished replicate is on disk before it is announced."""

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        assert finished_event(Path(spec.folder)) is not None
        super().replicate_finished(spec, row, kept)


def short_log(spec: ReplicateSpec) -> Log:
    return Log(spec, seconds=(1.0,), losses=(), accuracies=())


def measure(folder: Path, codes: Codes) -> dict[str, Any]:
    event = finished_event(folder)
    assert event is not None
    return {
        "state": event.state,
        "time_to_target_s": 1.0 + len(folder.name),
        "payload_bytes_per_sample": 2.0,
    }


def drive(folder: Path, storage: optuna.storages.BaseStorage, world: World, trap: Trap) -> Witness:
    """Run one driver until it ends or is killed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    progress = Witness()
    world.tick = trap.tick

    def run() -> None:
        study = optuna.create_study(
            storage=storage,
            study_name="study",
            directions=list(CONFIG.objectives.values()),
            load_if_exists=True,
        )
        study.sampler = make_sampler("tpe", CONFIG.seed, len(study.trials))
        book = TrialBook(study, SearchSpace(CONFIG.space, SHAPES), CONFIG.enqueue, CONFIG.seed)
        Driver(
            STUDY, RunFolder(folder), book, FakeCluster(world), progress, Interruption(), measure
        ).run()

    trap.spring(run)
    return progress


def finished_logs(folder: Path) -> dict[Path, bytes]:
    return {
        log: log.read_bytes()
        for log in folder.glob("trials/*/*/events.jsonl")
        if finished_event(log.parent) is not None
    }


def check_end(folder: Path, storage: optuna.storages.BaseStorage) -> None:
    """Check that each trial was reported once and each replicate finished once."""
    study = optuna.load_study(study_name="study", storage=storage)
    found = study.get_trials()
    assert {trial.state.name for trial in found} <= {"COMPLETE", "FAIL"}
    complete = [trial for trial in found if trial.state.name == "COMPLETE"]
    tried = [Configuration.model_validate(trial.user_attrs["configuration"]) for trial in complete]
    assert tried[0] == CONFIG.enqueue[0]
    space = SearchSpace(CONFIG.space, SHAPES)
    assert len({space.key(configuration) for configuration in tried}) == len(tried) == 2
    for trial in found:
        if trial.state.name == "FAIL":
            assert trial.user_attrs.keys() & {"duplicate_of", "orphan"}
    expected = {
        folder / "trials" / str(trial.number) / f"r{number}-none" / "events.jsonl"
        for trial in complete
        for number in range(2)
    }
    assert set(finished_logs(folder)) == expected


def outside(folder: Path, storage: optuna.storages.BaseStorage, world: World) -> object:
    """Return the state that outlives a driver, for comparison."""
    studies = storage.get_all_studies()
    trials = [
        (trial.state, trial.params, trial.user_attrs, trial.system_attrs, trial.values)
        for study in studies
        for trial in storage.get_all_trials(
            storage.get_study_id_from_name(study.study_name), deepcopy=False
        )
    ]
    contents = {path: path.stat().st_size for path in folder.rglob("*")}
    live = {run_id: supervisor.left for run_id, supervisor in world.live.items()}
    return repr(trials), contents, live


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out fsync: the kernel keeps the writes of a killed process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="module")
def kill_points(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Return the lines before which the state outside the driver has changed."""
    folder, storage = tmp_path_factory.mktemp("whole"), optuna.storages.InMemoryStorage()
    world = World(log=short_log)
    seen: list[object] = []
    points: list[int] = []

    def watch(line: int) -> None:
        now = outside(folder, storage, world)
        if not seen or seen[-1] != now:
            seen.append(now)
            points.append(line)

    drive(folder, storage, world, Trap(watch=watch))
    check_end(folder, storage)
    return points


@pytest.mark.parametrize("fate", ["ends by itself", "still runs", "died too"])
def test_a_driver_killed_at_any_point_loses_nothing(
    tmp_path: Path, kill_points: list[int], fate: str
) -> None:
    assert len(kill_points) > 40
    kept_some = adopted_some = 0
    for at in kill_points:
        folder, storage = tmp_path / str(at), optuna.storages.InMemoryStorage()
        world = World(log=short_log)
        with pytest.raises(Killed):
            drive(folder, storage, world, Trap(at))
        if fate == "ends by itself":
            world.run_on()
        elif fate == "died too":
            world.die()
        kept = finished_logs(folder)
        starts = Counter(world.starts)

        progress = drive(folder, storage, world, Trap())

        check_end(folder, storage)
        for log, content in kept.items():
            assert log.read_bytes() == content, f"killed at line {at}"
        again = world.starts - starts
        names = {f"{log.parent.parent.name}/{log.parent.name[1]}/none" for log in kept}
        assert not names & again.keys(), f"killed at line {at}: a finished replicate ran again"
        if fate != "died too":
            assert set(world.starts.values()) == {1}, f"killed at line {at}: {world.starts}"
        assert len(progress.of("finished")) == 4
        told = [number for number, *_ in progress.of("trial")]
        assert len(told) == len(set(told)) == 2
        kept_some += bool(kept)
        adopted_some += any(adopted for *_, adopted in progress.of("started"))
    assert kept_some > len(kill_points) / 2
    assert bool(adopted_some) == (fate == "still runs")


def test_a_sweep_ends_although_its_driver_is_killed_repeatedly(tmp_path: Path) -> None:
    storage, world = optuna.storages.InMemoryStorage(), World(log=short_log)
    drivers = 0
    while True:
        drivers += 1
        try:
            drive(tmp_path, storage, world, Trap(at=250 + 97 * drivers))
            break
        except Killed:
            world.die()
    assert drivers > 3
    check_end(tmp_path, storage)


SUICIDE = """
import os, signal, sys
from pathlib import Path
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_resume import STUDY, short_log

left = int(sys.argv[2])

def tick():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

world = World(log=short_log, tick=tick)
target = target_at(connect=world.connect)
run_sweep(STUDY, Path(sys.argv[1]), Recorder(), Interruption(), target)
"""


@pytest.mark.parametrize("tick", [4, 17])
def test_sqlite_and_the_lock_survive_kill_9(run_dir: Path, tick: int) -> None:
    done = subprocess.run([sys.executable, "-c", SUICIDE, str(run_dir), str(tick)], check=False)
    assert done.returncode == -signal.SIGKILL
    kept = finished_logs(run_dir)
    assert len(kept) == (0 if tick == 4 else 3)

    world, progress = World(log=short_log), Witness()
    run_sweep(
        STUDY,
        run_dir,
        progress,
        Interruption(),
        target=target_at(connect=world.connect),
    )
    assert {log: log.read_bytes() for log in kept} == kept
    assert sum(world.starts.values()) == 4 - len(kept)
    study = open_study(CONFIG, run_dir, "whoever")
    assert sum(trial.state.name == "COMPLETE" for trial in study.get_trials()) == 2
