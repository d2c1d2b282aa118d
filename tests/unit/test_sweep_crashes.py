"""A sweep whose driver is killed, again and again, equals one that nothing interrupted."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from rayhive.crash_points import DRIVER_POINTS
from rayhive.errors import RayhiveError
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep import journal
from rayhive.sweep.resolve import ResolvedStudy, WorkloadFacts, resolve
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.fixtures.postgresql import Server, postgresql
from tests.unit.sweep_crashes import Place, check_once, coverage, ends, finish_some, forked
from tests.unit.sweep_fakes import SHAPES, Killed, Recorder, Supervisor, World

STORAGES = ("sqlite", "journal", "postgresql")
Places = Callable[[str], Place]


def make_study(**fields: Any) -> ResolvedStudy:
    given: dict[str, Any] = {
        "name": "study",
        "workload": {"name": "digits"},
        "swarm": {"peers": 2, "target_batch_size": 128},
        # the second is the first under another name; two trials are sampled
        "enqueue": [
            Configuration(codec="float16"),
            Configuration(codec="size_adaptive", threshold=10**6),
        ],
        "space": {"codec": ["none", "float16", "uniform8"], "delay": ["none", "state"]},
        "replicates": 2,
        "scenarios": ["none", "kill-one"],
        "baselines": ["ddp"],
        "budget": {"trials": 3, "seconds_per_replicate": 30},
    }
    config = SweepConfig.model_validate({**given, **fields})
    return resolve(config, workload=WorkloadFacts(SHAPES, 32, "real"))


STUDY = make_study()
#: One trial of one replicate.
ONE: dict[str, Any] = {
    "budget": {"trials": 1},
    "scenarios": ["none"],
    "replicates": 1,
    "enqueue": [],
    "baselines": [],
}


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out syncs: the kernel keeps the writes of a killed process."""

    def connected(connection: Any, record: object) -> None:
        if type(connection).__module__.startswith("sqlite3"):
            connection.execute("PRAGMA synchronous = OFF")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        event.listen(Engine, "connect", connected)
        yield
        event.remove(Engine, "connect", connected)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgresql() as server:
        yield server


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    """Return a function that makes a new place in a kind of storage."""
    numbers = iter(range(1000))

    def place(storage: str) -> Place:
        folder = tmp_path / str(next(numbers)) / "run"
        folder.parent.mkdir()
        urls = {"sqlite": f"sqlite:///{folder}.db", "journal": f"journal:{folder}.log"}
        if storage in urls:
            return Place(folder, urls[storage])
        return Place(folder, request.getfixturevalue("server").database())

    return place


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the coverage of a sweep that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    place = Place(folder / "run", f"journal:{folder}/log")
    place.drive(STUDY)
    check_once(place, STUDY)
    return coverage(place)


@pytest.mark.parametrize(
    ("storage", "at_once"),
    [
        ("journal", 1),
        ("journal", 3),
        ("sqlite", 1),
        pytest.param("postgresql", 1, marks=pytest.mark.slow),
    ],
)
def test_a_driver_killed_at_each_point_loses_nothing_and_counts_nothing_twice(
    places: Places, whole: dict[str, Any], storage: str, at_once: int, tmp_path: Path
) -> None:
    place, armed = replace(places(storage), at_once=at_once), tmp_path / "armed"
    armed.mkdir()
    for point in DRIVER_POINTS:
        (armed / point).write_text("1")  # the second time
        code = forked(partial(place.drive, STUDY), armed=armed)
        assert code == -9 and not list(armed.iterdir()), f"{point} was not passed"
        finish_some(place.folder)
    place.drive(STUDY)
    check_once(place, STUDY)
    assert coverage(place) == whole


@pytest.mark.parametrize(
    ("storage", "kills"),
    [("journal", 6), *(pytest.param(name, 34, marks=pytest.mark.slow) for name in STORAGES)],
)
def test_a_driver_killed_at_random_changes_loses_nothing(
    places: Places, whole: dict[str, Any], storage: str, kills: int
) -> None:
    """A change is one of a file or a statement to the database: between two, a kill is the same."""
    draw, untouched = random.Random(17), places(storage)
    changes = forked(partial(untouched.drive, STUDY))
    while kills > 0:
        place = places(storage)
        for _ in range(min(kills, 6)):
            if forked(partial(place.drive, STUDY), at=draw.randint(1, changes // 3)) != -9:
                break
            kills -= 1
            place.outwait()
            if draw.random() < 0.5:
                finish_some(place.folder)
        place.drive(STUDY)
        check_once(place, STUDY)
        assert coverage(place) == whole


def once_lost(healthy: bool) -> World:
    """Return a cluster that loses every replicate, unless it is healthy."""

    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, state="lost" if not healthy else "completed")

    return World(log=log)


def test_a_trial_described_as_lost_by_a_dead_driver_is_told_once_with_its_values(
    places: Places, tmp_path: Path
) -> None:
    place, study = places("journal"), make_study(**ONE, retries=0)
    armed = tmp_path / "armed"
    armed.mkdir()
    (armed / "trial_described").touch()
    assert forked(lambda: place.drive(study, once_lost(False)) and None, armed=armed) == -9
    for _ in range(2):  # the second driver has nothing to do
        place.drive(study, once_lost(True), again=True)
        trials = [trial for trial in place.trials() if trial.state.name == "COMPLETE"]
        assert [trial.user_attrs[name] for trial in trials for name in ("failed", "lost")] == [
            None,
            None,
        ]


def test_charges_that_a_dead_driver_noted_are_replaced(places: Places, tmp_path: Path) -> None:
    """Replicates were added before the trial was told, and one of them fails."""
    place = places("journal")
    armed = tmp_path / "armed"
    armed.mkdir()
    (armed / "trial_described").touch()
    assert forked(lambda: place.drive(make_study(**ONE)) and None, armed=armed) == -9
    bad = World(log=lambda spec: Log(spec, state="failed" if spec.replicate else "completed"))
    place.drive(make_study(**{**ONE, "replicates": 2}), bad)
    (trial,) = [trial for trial in place.trials() if trial.state.name == "COMPLETE"]
    assert list(trial.constraints.values()) == [1.0]


@pytest.mark.parametrize("relative", [False, True])
def test_the_lock_of_a_driver_that_died_while_it_wrote_to_the_journal_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(journal, "GRACE_S", 3)
    (tmp_path / "sub").mkdir()
    place = Place(
        tmp_path / "run", "journal:sub/log" if relative else f"journal:{tmp_path}/sub/log"
    )
    study = make_study(**ONE)

    lock = tmp_path / "sub" / "log.lock"

    def sync(file: int) -> None:
        if lock.is_symlink():
            os.kill(os.getpid(), signal.SIGKILL)

    def die_in_the_lock() -> None:
        place.drive(study, World(tick=lambda: setattr(os, "fsync", sync)))

    assert forked(die_in_the_lock) == -9
    assert lock.is_symlink()
    place.drive(study)
    check_once(place, study)


def test_a_journal_whose_last_line_is_torn_goes_on(places: Places, tmp_path: Path) -> None:
    place, study, armed = places("journal"), make_study(**ONE), tmp_path / "armed"
    armed.mkdir()
    (armed / "replicate_folded").touch()
    assert forked(lambda: place.drive(study) and None, armed=armed) == -9
    with Path(f"{place.folder}.log").open("a") as file:
        file.write('{"op_code":6,"worker_id":"x-')
    place.drive(study)
    check_once(place, study)


@pytest.mark.slow
def test_a_database_that_was_restarted_is_connected_to_again(
    places: Places, server: Server, whole: dict[str, Any]
) -> None:
    place, calls = places("postgresql"), iter(range(10**6))

    def tick() -> None:
        if next(calls) == 10:
            server.restart()

    place.drive(STUDY, World(tick=tick))
    check_once(place, STUDY)
    assert coverage(place) == whole


@pytest.mark.slow
def test_a_database_that_is_gone_ends_the_sweep_with_one_error(
    places: Places, server: Server, whole: dict[str, Any]
) -> None:
    place, calls = places("postgresql"), iter(range(10**6))

    def tick() -> None:
        if next(calls) == 10:
            server.stop()

    world = World(tick=tick)
    target = target_at(connect=world.connect)
    with pytest.raises(RayhiveError, match=r"can't be used.*the same command resumes"):
        run_sweep(place.stored(STUDY), place.folder, Recorder(), Interruption(), target)
    server.start()
    run_sweep(place.stored(STUDY), place.folder, Recorder(), Interruption(), target)
    check_once(place, STUDY)
    assert coverage(place) == whole


@pytest.mark.parametrize("ended", [True, False], ids=["it has ended", "it is ending"])
def test_a_replicate_that_a_dead_driver_was_stopping_is_run_again(
    places: Places, ended: bool
) -> None:
    """`ray job stop` sends SIGTERM, and SIGKILL three seconds later."""
    place, study = places("journal"), make_study(**ONE)
    world = World(tick=lambda: die_if(world))
    with pytest.raises(Killed):
        place.drive(study, world)
    world.tick = lambda: None
    (supervisor,) = world.live.values()
    supervisor.stop_requested = True
    if ended:
        supervisor.finish("stopped", "interrupted by SIGTERM")
    else:
        supervisor.planned.state = "stopped"
    progress = place.drive(study, world)
    assert progress.of("finished") == [("0/0/none", "completed", False)]
    folder = place.folder / "trials" / "0" / "r0-none"
    assert [end.state for end in ends(folder)] == ["stopped", "completed"]


def test_a_replicate_that_is_stopped_from_outside_ends_the_sweep(places: Places) -> None:
    place, world = places("journal"), World(log=lambda spec: Log(spec, state="stopped"))
    with pytest.raises(Interrupted, match="stopped from outside"):
        place.drive(make_study(**ONE), world)


def test_a_replicate_is_not_begun_beside_a_supervisor_that_still_writes(places: Places) -> None:
    """Ray has forgotten it, as after the death of a head; it ends within a minute."""
    place, study = places("journal"), make_study(**ONE)
    with pytest.raises(Killed):
        place.drive(study, dying_once_started := World(tick=lambda: die_if(dying_once_started)))
    (log,) = place.folder.glob("trials/*/*/events.jsonl")
    (supervisor,) = dying_once_started.live.values()
    supervisor.file.hold()
    world = World(tick=lambda: pytest.fail("a second supervisor") if world.live else None)
    progress = Ending(supervisor)
    place.drive(study, world, progress=progress)
    assert not world.starts and progress.of("finished") == [("0/0/none", "completed", True)]
    assert [end.state for end in ends(log.parent)] == ["completed"]


def die_if(world: World) -> None:
    if world.live:
        raise Killed


class Ending(Recorder):
    """Ends a supervisor once the driver waits for it."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__()
        self.supervisor = supervisor

    def note(self, text: str) -> None:
        super().note(text)
        while self.supervisor.outcome is None:
            self.supervisor.step()
