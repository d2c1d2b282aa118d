"""Several replicates at the same time: the same trials as one at a time, and orderly ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import ClusterError, ConfigError, RayhiveError
from rayhive.metrics.rows import replicate_row
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import finished_event
from rayhive.sweep.driver import LOSSES, Done
from rayhive.sweep.resolve import ResolvedStudy
from rayhive.sweep.side_by_side import SideBySide
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_driver import journalled, make_study, stored

BIG: dict[str, Any] = {
    "space": {"codec": ["none", "float16", "uniform8"], "delay": ["none", "state"]},
    "budget": {"trials": 6, "seconds_per_replicate": 30},
    "replicates": 2,
}


class Busy(World):
    """World that counts the replicates that run at the same time."""

    most = 0

    def look(self, run_id: str) -> Any:
        self.most = max(self.most, len(self.live))
        return super().look(run_id)


def sweep(
    study: ResolvedStudy, folder: Path, world: World, parallel: int | str
) -> tuple[Done, Recorder]:
    progress = Recorder()
    with Interruption() as interruption:
        target = target_at(connect=world.connect)
        study = journalled(study, folder)
        return (
            run_sweep(study, folder, progress, interruption, target, parallel=parallel),
            progress,
        )


def uneven(spec: ReplicateSpec) -> Log:
    """Return a log whose figures depend on the replicate, and nothing else."""
    return Log(spec, payload=1000 + 10 * spec.trial + spec.replicate)


class Uneven(Busy):
    """World in which later replicates often end first."""

    def look(self, run_id: str) -> Any:
        if sum(map(ord, run_id)) % 3 and self.live[run_id].left > 1:
            self.live[run_id].left -= 1
        return super().look(run_id)


@pytest.mark.parametrize("parallel", [2, 3, "3", "auto"])
def test_trials_are_the_same_however_many_replicates_run_at_once(
    parallel: int | str, tmp_path: Path
) -> None:
    alone, beside = Uneven(looks=5, log=uneven), Uneven(looks=5, log=uneven)
    one, several = tmp_path / "one", tmp_path / "several"
    study = make_study(**BIG)
    done, _ = sweep(study, one, alone, 1)
    assert sweep(study, several, beside, parallel)[0] == done
    assert (alone.most, beside.most) == (1, 4 if parallel == "auto" else int(parallel))
    assert alone.starts == beside.starts

    def told(folder: Path) -> list[Any]:
        return [(t.params, t.values, t.state, t.constraints) for t in stored(study, folder)]

    assert told(one) == told(several)


def test_replicates_begin_in_their_order_and_a_batch_ends_before_the_next(tmp_path: Path) -> None:
    orders = []
    for parallel in (1, 3):
        _, progress = sweep(make_study(**BIG), tmp_path / str(parallel), World(looks=3), parallel)
        orders.append([name for name, *_ in progress.of("started")])
    assert orders[0] == orders[1]


def test_ctrl_c_stops_all_running_replicates_and_the_next_sweep_runs_the_rest(
    run_dir: Path,
) -> None:
    world = World(looks=4)
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            os.kill(os.getpid(), signal.SIGINT)

    world.tick = interrupt
    study = make_study(**BIG)
    with pytest.raises(Interrupted):
        sweep(study, run_dir, world, 3)
    assert not world.live
    assert len(world.awaited) == 3, "the command ends when all have stopped"
    ends = [finished_event(folder) for folder in run_dir.glob("trials/*/*")]
    assert ends.count(None) == 3
    world.tick = lambda: None
    done, progress = sweep(study, run_dir, world, 2)
    assert done.trials == 6
    assert sorted(world.ends.values()) == [1] * 12
    kept = [name for name, _, was_kept in progress.of("finished") if was_kept]
    assert len(kept) == len(ends) - 3 > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the dead driver
def test_a_new_driver_adopts_all_replicates_that_still_run(run_dir: Path) -> None:
    world = World(looks=6)

    class Died(BaseException):
        pass

    def die() -> None:
        if len(world.live) == 3:
            raise Died

    world.tick = die
    study = make_study(**BIG)
    with pytest.raises(Died):
        sweep(study, run_dir, world, 3)
    running = set(world.live)
    assert len(running) == 3
    world.tick = lambda: None
    _, progress = sweep(study, run_dir, world, 3)
    adopted = [name for name, _, was_adopted in progress.of("started") if was_adopted]
    assert len(adopted) == 3
    assert set(world.starts.values()) == {1}


def test_replicates_that_run_beside_common_failures_are_stopped(run_dir: Path) -> None:
    def failing(spec: ReplicateSpec) -> Log:
        return Log(spec, state="failed")

    world = World(looks=2, log=failing)
    with pytest.raises(RayhiveError, match="failed alike"):
        sweep(make_study(**BIG), run_dir, world, 3)
    assert not world.live
    assert all(trial.values is None for trial in stored(make_study(**BIG), run_dir))


def test_losses_in_a_row_are_counted_in_the_order_of_the_replicates(run_dir: Path) -> None:
    world = World(looks=2, log=lambda spec: Log(spec, state="lost"))
    with pytest.raises(ClusterError, match=f"{LOSSES} replicates in a row"):
        sweep(make_study(**BIG, retries=0), run_dir, world, 4)
    assert not world.live


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (0, "--parallel: 0 is not valid: a whole number of at least 1, or auto"),
        (-2, "--parallel: -2 is not valid"),
        ("two", "--parallel: 'two' is not valid"),
        ("atuo", "did you mean 'auto'"),
        (True, "--parallel: True is not valid"),
        (1.5, "--parallel: 1.5 is not valid"),
        (5, "--parallel: 5 is not valid: at most 4 on this cluster, as many as get nodes of their"),
    ],
)
def test_a_number_that_cannot_be_is_refused_before_anything_is_written(
    parallel: Any, text: str, run_dir: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        sweep(make_study(), run_dir, World(), parallel)
    assert text in str(refused.value)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("share", "text"), [(False, "nodes to itself"), (True, "not comparable with those")]
)
def test_a_sweep_says_whether_its_replicates_share_nodes(
    share: bool, text: str, run_dir: Path
) -> None:
    study = make_study(swarm={"peers": 2, "target_batch_size": 128, "share_nodes": share})
    _, progress = sweep(study, run_dir, World(), "auto")
    (note,) = [text for (text,) in progress.of("note") if "at a time" in text]
    assert note.startswith("4 replicates at a time") and text in note


def test_a_run_is_not_resumed_with_another_rule_for_nodes(run_dir: Path) -> None:
    sweep(make_study(), run_dir, World(), 1)
    shared = make_study(swarm={"peers": 2, "target_batch_size": 128, "share_nodes": True})
    with pytest.raises(ConfigError, match=r"swarm\.share_nodes"):
        sweep(shared, run_dir, World(), 1)


def test_a_row_counts_the_replicates_beside_it(run_dir: Path) -> None:
    from rayhive.events import EventLog, NodesShared

    sweep(make_study(budget={"trials": 1}, space={}, replicates=1), run_dir, World(), 1)
    folder = run_dir / "trials/0/r0-none"
    assert replicate_row(folder)["nodes_shared"] == 0
    log = EventLog(folder / "events.jsonl")
    log.append(NodesShared(replicates=["other-t0-r0-none-a0"]))
    log.append(NodesShared(replicates=["other-t0-r0-none-a0", "other-t1-r0-none-a0"]))
    log.close()
    assert replicate_row(folder)["nodes_shared"] == 2


# -- courses -----------------------------------------------------------------------------------

Course = Callable[[], Generator[None, None, int]]


def course(
    result: int, steps: int, ends: list[str], error: BaseException | None = None
) -> Generator[None, None, int]:
    try:
        for _ in range(steps):
            yield
        if error is not None:
            raise error
    except RuntimeError:
        ends.append(f"told {result}")
        yield
        ends.append(f"ended {result}")
        raise
    return result


def test_results_come_in_the_order_of_the_courses() -> None:
    ends: list[str] = []
    with SideBySide[int](3) as side_by_side:
        found = side_by_side.results(course(n, steps, ends) for n, steps in enumerate([5, 1, 0, 2]))
        assert list(found) == [0, 1, 2, 3]
    assert ends == []


def test_an_error_ends_the_courses_beside_it_all_told_before_any_is_awaited() -> None:
    ends: list[str] = []
    broken = course(0, 2, ends, ValueError("broken"))
    courses = [broken, *(course(number, 9, ends) for number in (1, 2, 3))]
    with pytest.raises(ValueError, match="broken"), SideBySide[int](3) as side_by_side:
        for _ in side_by_side.results(iter(courses)):
            raise AssertionError("no course has ended")
    assert ends == []  # they know no ValueError, and end at once

    stopped = [course(number, 9, ends) for number in (1, 2)]
    with pytest.raises(RuntimeError, match="stop"), SideBySide[int](3) as side_by_side:
        quick = course(0, 1, ends)
        for number in side_by_side.results(iter([quick, *stopped])):
            raise RuntimeError(f"stop after {number}")
    assert ends == ["told 1", "told 2", "ended 1", "ended 2"]
