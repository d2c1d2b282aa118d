"""Order of replicates: configurations and scenarios interleaved, determined by the seed."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rayhive.api import load
from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.driver import batch_end, run_order
from rayhive.sweep.resolve import resolve
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import Killed, Recorder, World, replicate_name
from tests.unit.test_sweep_driver import make_study
from tests.unit.test_sweep_parallel import sweep as side_by_side

pytestmark = pytest.mark.usefixtures("fakes")


def config(**fields: Any) -> SweepConfig:
    given = {"name": "a", "workload": {"name": "digits"}, "replicates": 3}
    return SweepConfig.model_validate({**given, **fields})


def started(folder: Path, world: World, **fields: Any) -> list[tuple[int, int, str]]:
    """Run a sweep and return trial, replicate and scenario of all that it started, in order."""
    study = resolve(
        {
            "name": "order",
            "workload": {"name": "digits"},
            "swarm": {"peers": 3, "target_batch_size": 128},
            "space": {"codec": ["none", "float16", "uniform8", "quantile8"]},
            "scenarios": ["none", "kill-one"],
            "replicates": 3,
            "budget": {"trials": 4, "seconds_per_replicate": 60},
            "storage": f"journal:{folder}.log",
            **fields,
        }
    )
    progress = Recorder()
    with Interruption() as interruption:
        try:
            run_sweep(study, folder, progress, interruption, target_at(connect=world.connect))
        except Interrupted:
            world.live.clear()
    found = [name.split("/") for name, *_ in progress.of("started")]
    return [(int(trial), int(number), scenario) for trial, number, scenario in found]


def test_replicates_of_a_configuration_are_not_run_back_to_back(tmp_path: Path) -> None:
    order = started(tmp_path / "run", World())
    assert len(order) == len(set(order)) == 24
    for number in range(3):  # a block has one replicate of each configuration and scenario
        block = order[8 * number : 8 * number + 8]
        assert {item[1] for item in block} == {number}
    together = sum(a[0] == b[0] for a, b in pairwise(order))
    assert together <= 8  # 20 of 23 when one was run after the other
    first = Counter(
        min(("none", "kill-one"), key=lambda scenario: order.index((trial, number, scenario)))
        for trial in {item[0] for item in order}
        for number in range(3)
    )
    assert min(first["none"], first["kill-one"]) >= 3  # the twin was first in 12 of 12


def recording(specs: list[ReplicateSpec]) -> Callable[[ReplicateSpec], Log]:
    """Return the log of a replicate that completes; its spec is added to a list."""

    def log(spec: ReplicateSpec) -> Log:
        specs.append(spec)
        return Log(spec)

    return log


def test_a_warm_up_comes_first_and_leaves_nothing(tmp_path: Path) -> None:
    specs: list[ReplicateSpec] = []
    world, folder = World(log=recording(specs)), tmp_path / "run"
    order = started(folder, world, warm_up_s=5)
    ran = [spec.scenario for spec in specs]
    assert ran[0] == "warm-up" and "warm-up" not in ran[1:]
    assert order == started(tmp_path / "without", World())  # it is not shown as a replicate
    assert not list(folder.rglob("*warm-up*"))
    assert set(load(folder).replicates["scenario"]) == {"none", "kill-one"}
    assert started(folder, world, warm_up_s=5) == []
    assert len(specs) == 25  # nothing was left to run, so nothing was warmed up


def test_a_replicate_that_was_interrupted_is_warmed_up_for(tmp_path: Path) -> None:
    """A driver that resumes a sweep has a cold cluster, too."""
    specs: list[ReplicateSpec] = []
    world, folder = World(log=recording(specs)), tmp_path / "run"
    started(folder, world, warm_up_s=5)
    interrupted = specs[3]
    (Path(interrupted.folder) / "events.jsonl").unlink()
    Log(interrupted, state="stopped").write(folder)
    del specs[:]
    started(folder, world, warm_up_s=5)
    assert [spec.scenario for spec in specs] == ["warm-up", interrupted.scenario]
    assert not list(folder.rglob("*warm-up*"))


def test_no_replicate_runs_beside_the_warm_up(tmp_path: Path) -> None:
    study = make_study(warm_up_s=5)
    order: list[str] = []

    class Ordered(World):
        def look(self, run_id: str) -> Any:
            name = replicate_name(self.live[run_id].spec)
            outcome = super().look(run_id)
            order.append(f"{name} {'runs' if outcome is None else 'ends'}")
            return outcome

    side_by_side(study, tmp_path / "run", Ordered(looks=5), 3)
    first = [name.endswith("warm-up ends") for name in order].index(True)
    assert all("warm-up" in name for name in order[: first + 1])
    assert len(order) > first + 6 * 5


def test_a_warm_up_of_a_driver_that_died_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    world, folder = World(), tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(shutil, "rmtree", die)
        side_by_side(make_study(warm_up_s=5), folder, world, 1)
    assert (folder / "warm-up").exists()
    side_by_side(make_study(warm_up_s=5), folder, world, 1)
    assert [count for name, count in world.starts.items() if name.endswith("warm-up")] == [2]
    assert not (folder / "warm-up").exists()


def test_a_warm_up_trains_without_faults_for_its_time(tmp_path: Path) -> None:
    specs: list[ReplicateSpec] = []
    started(
        tmp_path / "run",
        World(log=recording(specs)),
        warm_up_s=5,
        budget={"trials": 4, "seconds_per_replicate": 60, "samples_per_replicate": 12800},
    )
    first = specs[0]
    assert first.plan is None and first.early_stop is None
    assert first.budget.seconds_per_replicate == 5
    assert first.budget.samples_per_replicate is None
    assert specs[1].budget.samples_per_replicate == 12800


def test_the_seed_determines_the_order(tmp_path: Path) -> None:
    one, same, other = (
        started(tmp_path / name, World(), seed=seed)
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    assert one == same != other


def test_an_interrupted_sweep_resumes_in_the_same_order(tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", World())

    def tick() -> None:
        if sum(world.starts.values()) == 9:
            world.tick = lambda: None
            raise Interrupted("enough")

    world = World(tick=tick)
    before = started(tmp_path / "run", world)
    after = started(tmp_path / "run", world)
    assert len(before) in (8, 9)
    assert before[:8] + after == whole


def test_more_replicates_make_more_blocks(tmp_path: Path) -> None:
    world = World()
    before = started(tmp_path / "run", world, replicates=2)
    after = started(tmp_path / "run", world, replicates=3)
    assert before + after == started(tmp_path / "whole", World())


def test_trials_before_the_sampler_learns_are_one_batch() -> None:
    def ends(size: int | None, **fields: Any) -> list[int]:
        given, found = config(**fields), [0]
        while found[-1] < min(given.budget.trials, size or 10**9):
            found.append(batch_end(given, found[-1], size))
        return found[1:]

    assert ends(None, budget={"trials": 24}) == [10, 14, 18, 22, 24]
    assert ends(None, budget={"trials": 24}, interleave=1)[:3] == [10, 11, 12]
    assert ends(None, budget={"trials": 6}) == [6]
    assert ends(None, budget={"trials": 30}, enqueue=[{}] * 12) == [12, 16, 20, 24, 28, 30]
    assert ends(48, budget={"trials": 60}) == [48]  # all of the space is run in any case
    assert ends(48, budget={"trials": 12}) == [10, 12]


def test_every_replicate_runs_once_in_batches_of_any_size() -> None:
    given = config(scenarios=["none", "kill-one"], interleave=2)
    order = list(run_order(given, given.scenarios, 0, ["a", "b", "c"]))
    assert len(order) == len(set(order)) == 3 * 2 * 3
    assert order != list(run_order(given, given.scenarios, 3, ["a", "b", "c"]))
