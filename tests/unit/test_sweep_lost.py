"""Lost replicates: bounded further attempts, no charge, and a retry on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from typer.testing import CliRunner

from rayhive.cli.main import app
from rayhive.cluster.actors import silent
from rayhive.cluster.replicate.peer_table import Outcome, PeerTable
from rayhive.errors import ClusterError, SupervisorError
from rayhive.metrics.aggregate import fold
from rayhive.metrics.rows import replicate_row
from rayhive.spec import Timeouts
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import lost_attempts
from rayhive.sweep.driver import LOSSES, Done
from rayhive.sweep.resolve import ResolvedStudy
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import FakeCluster, FakeHandle, Recorder, World
from tests.unit.test_sweep_driver import journalled, make_study, stored, sweep

ONE = {"budget": {"trials": 1, "seconds_per_replicate": 30}, "space": {}, "replicates": 1}


def losing(lost: Callable[[ReplicateSpec], bool]) -> Callable[[ReplicateSpec], Log]:
    """Return the logs of replicates, some of which the infrastructure loses."""
    return lambda spec: Log(spec, state="lost" if lost(spec) else "completed")


def again(study: ResolvedStudy, folder: Path, world: World) -> tuple[Done, Recorder]:
    progress = Recorder()
    with Interruption() as interruption:
        study = journalled(study, folder)
        done = run_sweep(
            study,
            folder,
            progress,
            interruption,
            target=target_at(connect=world.connect),
            again=True,
        )
    return done, progress


def test_a_lost_replicate_is_run_again_and_only_the_good_attempt_counts(run_dir: Path) -> None:
    world = World(log=losing(lambda spec: spec.attempt < 2))
    done, progress = sweep(make_study(**ONE), run_dir, world)
    assert done.failed == 0 and world.starts["0/0/none"] == 3
    row = replicate_row(run_dir / "trials/0/r0-none")
    assert (row["state"], row["attempt"]) == ("completed", 2)
    (trial,) = stored(make_study(**ONE), run_dir)
    assert trial.state.name == "COMPLETE" and trial.values[0] < 60.0  # and no charge
    assert len(progress.of("note")) == 2


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_retries_bound_the_attempts(run_dir: Path, retries: int) -> None:
    world = World(log=losing(lambda spec: True))
    done, progress = sweep(make_study(**ONE, retries=retries), run_dir, world)
    assert world.starts["0/0/none"] == lost_attempts(run_dir / "trials/0/r0-none") == retries + 1
    assert progress.of("trial") == [(0, None, "no replicate was measured: lost")]
    assert (done.trials, done.failed) == (1, 1)
    (trial,) = stored(make_study(**ONE), run_dir)
    assert trial.state.name == "FAIL" and trial.user_attrs["lost"] is True
    # and a further sweep keeps it
    sweep(make_study(**ONE, retries=retries), run_dir, world)
    assert world.starts["0/0/none"] == retries + 1


def test_the_bound_holds_across_drivers_that_die(run_dir: Path) -> None:
    world = World(log=losing(lambda spec: True))
    for attempt in range(2):  # each driver sees one loss
        study = journalled(make_study(**ONE), run_dir)
        target = target_at(connect=world.connect)
        with pytest.raises(RuntimeError), Interruption() as interruption:
            run_sweep(study, run_dir, Dying(attempt), interruption, target)
        assert world.starts["0/0/none"] == attempt + 1
    sweep(make_study(**ONE), run_dir, world)
    assert world.starts["0/0/none"] == 3


class Dying(Recorder):
    """Ends its driver after a number of losses."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def note(self, text: str) -> None:
        if not self.left:
            raise RuntimeError(text)
        self.left -= 1


def test_a_trial_with_a_lost_replicate_gets_the_values_of_the_others(run_dir: Path) -> None:
    study = make_study(budget={"trials": 1, "seconds_per_replicate": 30}, space={})
    sweep(study, run_dir, World(log=losing(lambda spec: spec.replicate == 1)))
    (trial,) = stored(study, run_dir)
    good = replicate_row(run_dir / "trials/0/r0-none")
    assert trial.values[0] == pytest.approx(good["time_to_target_s"])
    rows = [replicate_row(path) for path in sorted(run_dir.glob("trials/0/*"))]
    (row,) = fold(rows)
    assert (row["n"], row["n_failed"], row["n_lost"]) == (1, 0, 1)


def test_retry_runs_lost_replicates_and_reports_their_values(run_dir: Path) -> None:
    healthy = False
    world = World(log=losing(lambda spec: spec.trial == 0 and not healthy))
    study = make_study(replicates=1)
    done, _ = sweep(study, run_dir, world)
    assert (done.trials, done.failed) == (3, 1)
    before = dict(world.starts)

    healthy = True
    done, progress = again(study, run_dir, world)
    assert (done.trials, done.failed) == (3, 0)
    assert world.starts["0/0/none"] == 4
    assert {k: v for k, v in world.starts.items() if k != "0/0/none"} == {
        k: v for k, v in before.items() if k != "0/0/none"
    }
    values = progress.of("trial")[0][1]
    assert values is not None
    trials = stored(study, run_dir)
    assert trials[0].state.name == "FAIL"  # Optuna keeps what it was told ...
    (amended,) = [t for t in trials if t.user_attrs.get("amends") == 0]
    assert amended.state.name == "COMPLETE"  # ... and learns from another trial
    assert tuple(amended.values) == values and amended.params == trials[0].params

    done, progress = again(study, run_dir, world)  # once more changes nothing
    assert (done.trials, done.failed, len(stored(study, run_dir))) == (3, 0, len(trials))
    assert all(kept for *_, kept in progress.of("finished"))


def test_retries_of_a_replicate_that_is_lost_again_are_bounded(run_dir: Path) -> None:
    world = World(log=losing(lambda spec: True))
    sweep(make_study(**ONE), run_dir, world)
    done, _ = again(make_study(**ONE), run_dir, world)
    assert done.failed == 1 and world.starts["0/0/none"] == 6


def test_a_sweep_of_lost_replicates_ends_and_names_the_retry_command(run_dir: Path) -> None:
    world = World(log=losing(lambda spec: True))
    study = make_study(budget={"trials": 3, "seconds_per_replicate": 30}, retries=0)
    with pytest.raises(ClusterError, match=rf"{LOSSES} replicates in a row .*rayhive retry"):
        sweep(study, run_dir, world)
    assert sum(world.starts.values()) == LOSSES


def test_a_supervisor_that_does_not_start_loses_the_attempt_and_not_the_study(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, before = [2], FakeCluster.start

    def start(self: FakeCluster, spec: ReplicateSpec) -> Any:
        if refused[0]:
            refused[0] -= 1
            raise SupervisorError("it did not start within 60 s")
        return before(self, spec)

    monkeypatch.setattr(FakeCluster, "start", start)
    done, _ = sweep(make_study(**ONE), run_dir, World())
    assert done.failed == 0
    assert replicate_row(run_dir / "trials/0/r0-none")["attempt"] == 2


def test_an_outcome_counts_if_the_supervisor_dies_during_clean_up(run_dir: Path) -> None:
    world = World()
    sweep(make_study(**ONE), run_dir, world)
    log = run_dir / "trials/0/r0-none/events.jsonl"
    lines = log.read_text().splitlines()
    assert '"replicate_finished"' in lines[-1]
    outcome = lines[-1].replace("replicate_finished", "outcome")
    log.write_text("\n".join([*lines[:-1], outcome]) + '\n{"kind":"inv')
    done, progress = sweep(make_study(**ONE), run_dir, world)
    assert done.failed == 0 and world.starts["0/0/none"] == 1
    assert progress.of("finished") == [("0/0/none", "completed", True)]


def test_timeouts_may_change_on_resumption_and_measured_settings_may_not(run_dir: Path) -> None:
    sweep(make_study(**ONE), run_dir, World())
    patient = make_study(**ONE, retries=5, timeouts={"placing": 3600, "barrier": 900})
    done, _ = sweep(patient, run_dir, World())
    assert done.trials == 1


def test_a_study_sets_the_limits_of_its_supervisors(run_dir: Path) -> None:
    sweep(make_study(**ONE, timeouts={"placing": 1, "barrier": 4}), run_dir, World())
    specs = [ReplicateSpec.model_validate_json(p.read_bytes()) for p in run_dir.rglob("spec.json")]
    assert specs and all(spec.timeouts == Timeouts(placing=1, barrier=4) for spec in specs)


def _agent(error: Exception | None) -> Any:
    async def ping() -> None:
        if error is not None:
            raise error

    return SimpleNamespace(ping=SimpleNamespace(remote=ping))


def _blamed(peer_table: PeerTable, agents: dict[str, Any], nodes: dict[str, str]) -> Outcome:
    """Return the outcome of a peer's failure, given the agents of the nodes."""

    async def silent_nodes(peers: Sequence[str]) -> dict[str, str]:
        asked = {nodes[name] for name in peers}
        return await silent({node: agents[node] for node in sorted(asked)}, 1.0)

    return asyncio.run(peer_table.blame("peer-1: killed", silent_nodes))


@pytest.mark.parametrize(
    ("actor_lost", "error", "state"),
    [(False, None, "failed"), (True, None, "lost"), (False, ActorDiedError(), "lost")],
    ids=["its own failure", "its actor is gone", "its node is gone"],
)
def test_a_failure_counts_as_lost_only_if_a_part_of_the_cluster_is_gone(
    actor_lost: bool, error: Exception | None, state: str
) -> None:
    peers = PeerTable(["peer-0", "peer-1"])
    peers.lost("peer-1", "its process was killed by signal 9", actor_lost)
    nodes = dict.fromkeys(peers.peers, "node")
    outcome = _blamed(peers, {"node": _agent(error)}, nodes)
    assert outcome.state == state
    assert "peer-1: killed" in outcome.stop_reason


def test_a_node_that_a_fault_takes_away_is_not_awaited() -> None:
    peers = PeerTable(["peer-0", "peer-1"])
    peers.peers["peer-1"].loss_expected = True
    peers.lost("peer-1", "its actor died", actor_lost=True)
    agents = {"a": _agent(None), "b": _agent(ActorDiedError())}
    assert _blamed(peers, agents, {"peer-0": "a", "peer-1": "b"}).state == "failed"


def test_a_node_agent_that_hangs_counts_as_silent() -> None:
    async def ping() -> None:
        await asyncio.sleep(60)

    hanging = SimpleNamespace(ping=SimpleNamespace(remote=ping))
    found = asyncio.run(silent({"n": hanging, "m": _agent(None)}, 0.05))
    assert found == {"n": "no answer within 0.05 s"}


def test_a_supervisor_of_an_ended_attempt_is_not_adopted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHandle, "release", lambda self: None)  # it takes its time
    world = World(log=losing(lambda spec: spec.attempt == 0))
    _, progress = sweep(make_study(**ONE), run_dir, world)
    assert progress.of("started") == [("0/0/none", 0, False), ("0/0/none", 1, False)]


def test_the_retry_command_takes_longer_timeouts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(make_study(**ONE), run_dir, World())
    (run_dir / "sweep.yaml").write_text(make_study(**ONE).config.to_yaml())
    seen: list[Any] = []

    def run(study: ResolvedStudy, folder: Path, *arguments: Any, **options: Any) -> Done:
        seen.append((study.config.timeouts.starting, folder, options["again"]))
        return Done(1, 0, 0, False)

    monkeypatch.setattr("rayhive.sweep.sweep.run_sweep", run)
    arguments = ["retry", str(run_dir), "--set", "timeouts.starting=300"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert seen == [(300.0, run_dir, True)]


def test_retry_needs_a_run_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["retry", str(tmp_path)])
    assert "a run folder, which has a sweep.yaml" in str(result.exception)
