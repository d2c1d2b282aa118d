"""End of a baseline's training in this process, with a channel that only records."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import MPIEnvironment

from rayhive.events import Event, Round
from rayhive.peer.baseline import BaselineTraining
from rayhive.peer.channel import Channel
from rayhive.peer.from_spec import PeerFit
from rayhive.registry import BASELINES
from rayhive.spec.replicate import PeerSpec
from rayhive.workloads.digits import Digits

ROUNDS = 3


class Poison(Callback):
    """Makes a parameter infinite before the last batch of a round.

    Args:
        round: Number of the round.
    """

    def __init__(self, round: int) -> None:
        self.round, self.batches = round, 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        if self.batches == 2 * self.round:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = torch.inf


class Miss(Callback):
    """Has a peer miss another one in a batch, after a notice.

    Args:
        channel: The peer's channel.
        batch: Number of the batch.
    """

    def __init__(self, channel: Any, batch: int) -> None:
        self.channel, self.batch = channel, batch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            self.channel.notice = math.inf
            raise RuntimeError("gloo: Connection closed by peer")


def spec_of(seed: int = 7, baseline: str = "single", samples: int = 16, **given: Any) -> PeerSpec:
    return PeerSpec.model_validate(
        {
            "run_id": "end",
            "peer": 0,
            "peers": 1,
            "seed": seed,
            "workload": {"name": "digits"},
            "swarm": {"peers": 1, "batch_size": 8, "target_batch_size": 16},
            "configuration": {},
            "budget": {"samples_per_replicate": samples, "seconds_per_replicate": 60},
            "evaluation": {"every_samples": 16 * ROUNDS},
            "baseline": baseline,
            **given,
        }
    )


def events_of(
    seed: int = 7,
    poisoned: int | None = None,
    misses: int | None = None,
    baseline: str = "single",
    begins: Callable[[Any], None] = lambda kind: None,
    samples: int = 16 * ROUNDS,
    **settings: Any,
) -> list[Event]:
    """Return the events of a peer that trains alone for some rounds of two batches."""
    spec = spec_of(seed, baseline, samples, **settings)
    emitted: list[Event] = []
    channel = SimpleNamespace(emit=emitted.append, wait_for=begins, notice=None, stop_reason=None)
    channel.has_left = False
    channel.say_goodbye = MethodType(Channel.say_goodbye, channel)
    fit, member = PeerFit(spec, (0, 1)), BASELINES.get(baseline)().member(spec, 8)
    member.listen([])
    member.connect()
    training = BaselineTraining(spec, fit, member, channel, {})  # type: ignore[arg-type]
    trainer = fit.make_trainer(
        member.strategy(),  # type: ignore[arg-type]
        training,  # type: ignore[arg-type]
        accumulate_grad_batches=member.batches_per_round,
    )
    if poisoned is not None:
        trainer.callbacks.append(Poison(poisoned))  # type: ignore[attr-defined]
    if misses is None:
        fit.run(trainer)
    else:
        trainer.callbacks.append(Miss(channel, misses))  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="gloo"):
            fit.run(trainer)
    return emitted


@pytest.mark.parametrize(
    ("poisoned", "reason", "round"), [(None, "rounds", 3), (2, "diverged", 2), (3, "diverged", 3)]
)
def test_a_divergence_in_the_last_round_is_one(
    poisoned: int | None, reason: str, round: int
) -> None:
    event: Any = events_of(poisoned=poisoned)[-1]
    assert (event.kind, event.reason, event.round) == ("peer_finished", reason, round)


def test_a_divergence_that_only_the_last_evaluation_shows_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Digits, "evaluate", lambda *_: {"loss": math.inf, "accuracy": 0.1})
    event: Any = events_of(evaluation={"every_samples": 10**6})[-1]
    assert (event.kind, event.reason, event.round) == ("peer_finished", "diverged", ROUNDS)


def test_a_peer_with_a_notice_that_misses_another_tells_what_it_computed() -> None:
    """It told of no samples, though its rounds had some."""
    left, end = (event.model_dump() for event in events_of(misses=3)[-2:])
    assert (left["kind"], left["round"], left["lost"]) == ("left", 1, 8)
    assert (end["kind"], end["reason"], end["samples"]) == ("peer_finished", "notice", 24)
    assert end["clock_s"] > 0


def test_a_peer_starts_no_mpi_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    # where mpi4py is installed, Lightning's question starts one, which outlives the peer's fit
    monkeypatch.setattr(MPIEnvironment, "detect", lambda: pytest.fail("it asked MPI"))
    event: Any = events_of()[-1]
    assert event.reason == "rounds"


def test_a_large_seed_trains() -> None:
    event: Any = events_of(seed=2**63 - 1)[-1]
    assert event.reason == "rounds"


def test_the_loss_of_a_round_is_the_mean_over_its_batches() -> None:
    first = next(event for event in events_of() if event.kind == "round")
    assert first["loss"] == pytest.approx(math.log(10), abs=0.2)  # of ten digits, by chance


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a member of DDP sets."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.usefixtures("own_environment")
def test_a_member_of_ddp_exchanges_nothing_before_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcasts: list[Any] = []

    def begins(kind: Any) -> None:  # from here on Lightning sees two members
        monkeypatch.setattr(Trainer, "world_size", 2)
        monkeypatch.setattr(dist, "broadcast", lambda *args, **_: broadcasts.append(args))

    emitted = events_of(baseline="ddp", begins=begins)
    assert [event.round for event in emitted if isinstance(event, Round)] == [1, 2, 3]
    assert not broadcasts


@pytest.mark.parametrize(("baseline", "once_a_batch"), [("ddp", True), ("hivemind", False)])
def test_a_schedule_that_the_strategy_steps_is_left_alone(
    baseline: str, once_a_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind steps it once a round; of DDP, a step of the optimizer is a round."""
    monkeypatch.setattr(BaselineTraining, "_begin", lambda *_: None)
    spec = spec_of(baseline=baseline)
    member = BASELINES.get(baseline)().member(spec, 8)
    training = BaselineTraining(spec, Any, member, SimpleNamespace(emit=Any), {})  # type: ignore[arg-type]
    config = SimpleNamespace(scheduler=None, interval="epoch", frequency=sys.maxsize)
    trainer: Any = SimpleNamespace(lr_scheduler_configs=[config])
    training.on_train_start(trainer, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    assert (config.interval, config.frequency) == (
        ("step", 1) if once_a_batch else ("epoch", sys.maxsize)
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.usefixtures("own_environment")
def test_a_member_of_local_sgd_averages_after_each_round_of_steps_and_not_before(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen parameters, which are equal everywhere, are not averaged."""
    module = Digits.module

    def partly_frozen(workload: Digits, seed: int) -> Any:
        made = module(workload, seed)
        for parameter in [*made.parameters()][:2]:
            parameter.requires_grad_(not frozen)
        return made

    monkeypatch.setattr(Digits, "module", partly_frozen)
    averaged: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        averaged.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    emitted = events_of(baseline="local-sgd", local_sgd={"local_steps": 3}, samples=96)
    rounds = [event for event in emitted if isinstance(event, Round)]
    # three batches of the swarm, 16 samples each, are six steps of eight
    assert [(event.round, event.samples) for event in rounds] == [(1, 48), (2, 48)]
    parameters = next(event for event in emitted if event.kind == "peer_ready").dense_payload_bytes
    assert [size for size in averaged if size > 1] == [parameters // 4] * 2
