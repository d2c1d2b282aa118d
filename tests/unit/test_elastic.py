"""Baseline ``elastic``: what a return to a checkpoint means for samples, rounds and times."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from rayhive import events
from rayhive.baselines import collectives, elastic
from rayhive.baselines.collectives import Agreement
from rayhive.baselines.elastic import ElasticRank, launch_config, newest_checkpoint
from rayhive.errors import ConfigError
from rayhive.invariants import check_all
from rayhive.metrics.fault_impact import impacts
from rayhive.metrics.groups.badput import DOWN, RETRY, TRANSFER, time_spent
from rayhive.metrics.groups.convergence import evaluations
from rayhive.metrics.groups.faults import samples_lost
from rayhive.metrics.rows import timeline_row
from rayhive.peer.elastic import WorkerHistory, WorkerRelay
from rayhive.spec import SweepConfig, commands
from rayhive.spec.study import ElasticConfig
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.resumption import differences
from tests.fixtures.faulted import ALL, REST, Story, planned
from tests.fixtures.logs import make_spec
from tests.unit.sweep_fakes import SHAPES, TINY

#: Own samples that each survivor of the story loses: rounds 3 and 4, and 16 pending ones.
LOST = 2 * 64 + 16


def back_to_round_2() -> Story:
    """Peer 1 of three is killed at 4.5 s, after round 4; the others go on from round 2 at 8.0 s.

    Rounds have 64 samples a peer. At the kill peer 1 has 32 pending ones, the others 16 each.
    Rounds 3 to 6 follow at 9, 10, 11 and 12 s with two peers. At 13 s each has 6 pending samples.
    """
    story = Story([planned()], trial=None, baseline="elastic")
    story.rounds(1.0, 2.0, peers=ALL)
    for name in ALL:
        story.say(2.0, "checkpoint", name, round=2, ok=True, bytes=1000, seconds=0.05)
    story.rounds(3.0, 4.0, peers=ALL)
    story.evaluate(4.0, ALL, 0.04)
    story.fire(4.5, 0, ["peer-1"])
    story.lose(4.55, "peer-1", computed=32)
    for name in REST:
        story.computed[name] += 16
        story.say(4.6, "progress", name, computed=story.computed[name])
        story.say(
            8.0, "rolled_back", name, round_before=4, round=2, group=list(REST), seconds=3.4,
            load_s=0.4, lost=LOST,
        )  # fmt: skip
    story.round = 2
    story.rounds(9.0, 10.0, 11.0, 12.0, peers=REST)
    story.evaluate(12.6, REST, 0.5)
    story.finish(13.0, REST, pending=6)
    story.end(14.0)
    return story


def test_rounds_since_the_checkpoint_are_not_committed() -> None:
    timeline = back_to_round_2().timeline
    assert timeline.rounds == (1, 2, 3, 4, 5, 6)
    assert timeline.committed() == 2 * 3 * 64 + 4 * 2 * 64
    assert timeline.committed(until=3) == 2 * 3 * 64 + 2 * 64
    # the killed peer loses its rounds 3 and 4, too
    assert samples_lost(timeline) == 2 * LOST + 2 * 64 + 32
    row = timeline_row(timeline)
    assert row["goodput"] == timeline.committed() / (2 * (256 + 16 + 256 + 6) + 256 + 32)


def test_evaluations_of_undone_rounds_do_not_count() -> None:
    (point,) = evaluations(back_to_round_2().timeline)
    assert (point.round, point.values["loss"]) == (6, 0.5)


def test_throughput_before_the_fault_is_that_of_the_rounds_undone_later() -> None:
    (impact,) = impacts(back_to_round_2().timeline)
    assert impact.detect_s == pytest.approx(8.9 - 4.5)
    assert impact.recover_s == pytest.approx(8.9 - 4.5)  # 64 samples a peer and second, as before


def test_restarts_are_down_time_and_undone_rounds_wasted() -> None:
    spent, _ = time_spent(back_to_round_2().timeline)
    # of the survivors 3.4 s each without the exchange, and of the killed peer all the rest
    assert spent[DOWN] == pytest.approx(2 * 3.0 + (13.0 - 4.55))
    assert spent[TRANSFER] == pytest.approx(2 * 0.4 + 3 * 0.05)
    assert spent[RETRY] > 2 * 0.6


def test_invariants_hold_and_find_a_wrong_loss_and_a_wrong_round() -> None:
    def failed(story: Story) -> list[str]:
        results = check_all(story.spec, story.timeline.events)
        return [result.name for result in results if not result.ok]

    assert failed(back_to_round_2()) == []
    story = back_to_round_2()
    story.of("rolled_back", "peer-0")[0]["lost"] -= 1
    assert failed(story) == ["samples_conserved"]
    story = back_to_round_2()
    story.of("rolled_back", "peer-0")[0]["round"] = 1
    assert "rounds_monotone" in failed(story)


# -- the peer ----------------------------------------------------------------------------------


def test_a_new_process_gets_what_the_last_one_did() -> None:
    history = WorkerHistory()
    assert history.take(events.PeerReady(), now=0.0)
    assert not history.take(events.PeerReady(), now=0.0)  # of another process before the start
    assert not history.resume(None, now=5.0).training
    history.take(events.TrainingStarted(round=0), now=10.0)
    for number in (1, 2, 3):
        computed = 24 * number
        history.take(
            events.Round(round=number, samples=24, outcome="averaged", computed=computed), 11.0
        )
        history.take(events.Transition(round=number, seconds=1.0, clock_s=1.0 * number), 11.0)
        if number == 2:
            history.take(events.Checkpoint(round=2, ok=True), now=11.0)
    history.take(events.Progress(computed=80), now=12.0)
    given = history.resume(13.0, now=15.0)
    assert (given.training, given.round, given.computed, given.pending) == (True, 3, 80, 8)
    assert given.rounds == ((3, 24),)
    # three seconds at its last transition, four seconds ago
    assert (given.clock_s, given.round_ended_s, given.ended_s) == (7.0, 3.0, 13.0)
    history.take(
        events.RolledBack(round_before=3, round=2, group=["peer-0"], seconds=2.0, lost=32), 15.0
    )
    assert (history.round, history.pending) == (2, 0)
    assert history.resume(None, now=16.0).rounds == ()


@pytest.mark.parametrize("joined", [False, True])
def test_a_peer_whose_process_still_meets_the_others_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    emitted: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended = threading.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.set())
    heard: list[Any] = []
    channel: Any = SimpleNamespace(
        emit=emitted.put, listen=heard.append, stop_reason=None, has_failed=False
    )
    relay = WorkerRelay(channel)
    relay.history.take(events.TrainingStarted(round=0), now=0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
        worker.settimeout(10)
        worker.connect(relay.address)
        lines = worker.makefile(encoding="utf-8")
        assert json.loads(lines.readline())["training"]
        if joined:
            worker.sendall(events.dump_event(events.Progress(computed=8)).encode() + b"\n")
            assert emitted.get(timeout=10).computed == 8
        channel.stop_reason = "seconds"
        heard[0](commands.Stop(reason="seconds"))
        if joined:  # it ends after its round, together with the others
            assert json.loads(lines.readline())["reason"] == "seconds"
            assert emitted.empty() and not ended.is_set()
        else:
            assert emitted.get(timeout=10).reason == "seconds"
            assert ended.is_set()
        lines.close()
    assert ended.wait(10)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_elastic_gives_up_a_member_that_vanished_once_training_has_begun(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first broadcast of a large model over a slow link took longer than that, and failed."""
    limits: list[timedelta] = []
    for module in (collectives, elastic):
        monkeypatch.setattr(module, "_set_pg_timeout", lambda limit, *_: limits.append(limit))
    spec = make_spec(trial=None, baseline="elastic", elastic=ElasticConfig()).peer_spec(0)
    rank = ElasticRank(spec, batch_size=8)
    rank.begin()
    assert limits == []  # those of torch
    rank.training_began()
    soon = timedelta(seconds=max(30.0, spec.swarm.averaging_timeout))
    assert limits == [soon, soon]
    rank.meet()
    assert limits[2:] == [default_pg_timeout] * 2 + [soon] * 2
    rank.close()


def test_a_reason_that_members_do_not_agree_on_is_a_stop(group: None) -> None:
    """A supervisor that ends a replicate says ``rounds``: a member ended with an error."""
    agreement = Agreement()
    for reason, agreed in (("rounds", None), ("diverged", "stop"), (None, "diverged")):
        assert agreement.after_round(reason) == agreed
    assert agreement.settle() is None


def test_an_evaluation_before_a_restart_takes_no_training_time() -> None:
    history = WorkerHistory()
    history.take(events.TrainingStarted(round=0), now=0.0)
    history.take(events.Transition(round=1, seconds=1.0, clock_s=100.0), now=100.0)
    found = events.Evaluation(round=1, samples=64, clock_s=100.0, values={"loss": 1.0}, final=False)
    history.take(found, now=120.0)
    assert history.resume(123.0, now=125.0).clock_s == 105.0


def test_rounds_are_undone_when_all_that_had_a_checkpoint_are_gone() -> None:
    """They counted beside those with which training began again."""
    story = Story([planned()], trial=None, baseline="elastic")
    story.rounds(1.0, 2.0, peers=ALL)
    for name in ALL:
        story.lose(2.5, name)
    story.spawn(3.0, "peer-1.1")
    story.ready(4.0, "peer-1.1")
    story.train(4.0, "peer-1.1")
    story.say(
        4.0, "rolled_back", "peer-1.1", round=0, group=["peer-1.1"], seconds=0.0, load_s=0.0,
        lost=0,
    )  # fmt: skip
    story.round = 0
    story.rounds(5.0, 6.0, 7.0, peers=["peer-1.1"])
    story.finish(8.0, ["peer-1.1"])
    story.end(9.0)
    timeline = story.timeline
    assert (timeline.rounds, timeline.committed()) == ((1, 2, 3), 3 * 64)
    assert samples_lost(timeline) == 2 * 3 * 64
    assert [each.name for each in check_all(story.spec, timeline.events) if not each.ok] == []


def test_the_agent_has_torchruns_options() -> None:
    replicate = make_spec(
        trial=None, baseline="elastic", elastic=ElasticConfig(last_call_timeout=7)
    )
    config = launch_config(replicate.peer_spec(1), "10.0.0.1:29400", "/nowhere")
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 2, 1)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "10.0.0.1:29400")
    given = config.rdzv_configs
    assert (given["is_host"], given["last_call_timeout"]) == (False, 7)
    assert (given["keep_alive_interval"], given["keep_alive_max_attempt"]) == (5, 3)


def test_the_newest_checkpoint_is_that_of_the_last_round(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == (0, None)
    for name in ("round-9.ckpt", "round-10.ckpt", "unfinished", ".round-11.ckpt.1.new"):
        (tmp_path / name).touch()
    assert newest_checkpoint(tmp_path) == (10, tmp_path / "round-10.ckpt")


# -- the study ---------------------------------------------------------------------------------


def test_its_settings_are_checked_with_the_rest_of_the_study() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(
            {**TINY, "baselines": ["elastc"], "elastic": {"checkpoint_every_rounds": 0}},
            workload=WorkloadFacts(SHAPES, 32, "real"),
        )
    assert "elastic.checkpoint_every_rounds" in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve(
            {**TINY, "baselines": ["elastc"]},
            workload=WorkloadFacts(SHAPES, 32, "real"),
        )
    assert "did you mean 'elastic'?" in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve({**TINY, "elastic": {"last_call": 3}}, workload=WorkloadFacts(SHAPES, 32, "real"))
    assert "last_call_timeout" in str(error.value)


def test_its_settings_may_change_until_it_has_run(tmp_path: Path) -> None:
    def study(*baselines: str, period: int) -> SweepConfig:
        settings = {"checkpoint_every_rounds": period}
        given = {**TINY, "baselines": list(baselines), "elastic": settings}
        return resolve(given, workload=WorkloadFacts(SHAPES, 32, "real")).config

    new = study("ddp", "elastic", period=5)
    for before in (study("ddp", period=10), study("elastic", period=10)):
        assert not list(differences(before, new, tmp_path))
    (tmp_path / "trials" / "elastic").mkdir(parents=True)
    (problem,) = differences(study("elastic", period=10), new, tmp_path)
    assert problem.key == "elastic.checkpoint_every_rounds"
