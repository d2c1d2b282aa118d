"""Local progress: every step of a peer enters exactly one round, whatever becomes of the rounds."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.compression.fragments import split
from rayhive.errors import ConfigError
from rayhive.optim.local_rule import FragmentSGD, LocalStepsRule
from rayhive.optim.local_steps import LocalSteps, common_parameters, with_common_parameters
from rayhive.spec import Configuration, SwarmConfig, SweepConfig
from rayhive.spec.fault_plan import At, FaultPlan, PlannedFault
from rayhive.spec.rules import check_sweep
from rayhive.sweep.link_time import round_traffic


class Averager:
    """Keeps what a peer contributes to a round."""

    local_samples_accumulated = local_times_accumulated = 0

    def set_accumulated(self, values: Iterable[torch.Tensor], samples: int, steps: int = 1) -> None:
        self.sent, self.weight, self.steps = [value.clone() for value in values], samples, steps
        self.local_samples_accumulated = self.local_times_accumulated = 0  # as after each round


class Peer:
    """A peer with one parameter of two elements, which moves by -1 with each batch."""

    def __init__(self, delayed: bool = False, inner_state: Any = "keep") -> None:
        self.parameter = torch.nn.Parameter(torch.tensor([10.0, 20.0]))
        self.inner = torch.optim.SGD([self.parameter], lr=1.0, momentum=0.0)
        rule = LocalStepsRule(4, 1.0, 0.0, inner_state)
        self.averager: Any = Averager()
        self.local = LocalSteps(rule, self.inner, [self.parameter], self.averager, delayed)
        self.outer = torch.tensor([10.0, 20.0])

    def batches(self, count: int, samples: int = 8) -> None:
        for _ in range(count):
            self.parameter.grad = torch.ones(2)
            self.local.step(samples)

    def change_outer(self, by: float) -> None:
        self.outer = self.outer + by
        self.local.adopt([self.outer])

    @property
    def value(self) -> float:
        assert float(self.parameter.detach().diff()) == 10.0
        return float(self.parameter.detach()[0])


def test_a_round_takes_the_progress_and_sets_the_parameters() -> None:
    peer = Peer()
    peer.batches(3)
    peer.local.take(1)
    assert peer.averager.sent[0].tolist() == [3.0, 3.0] and peer.averager.weight == 24
    assert peer.averager.steps == 3
    peer.change_outer(-2.5)
    peer.local.end_round(skipped=False)
    assert torch.equal(peer.parameter.detach(), peer.outer)
    peer.batches(1)
    peer.local.take(1)
    assert peer.averager.sent[0].tolist() == [1.0, 1.0] and peer.averager.weight == 8
    assert peer.averager.steps == 1


def test_steps_during_a_delayed_round_enter_the_next_one() -> None:
    peer = Peer(delayed=True)
    peer.batches(3)
    peer.local.take(1)
    peer.batches(2)
    peer.change_outer(-4.0)
    assert peer.value == 10 - 4 - 2
    peer.change_outer(-0.5)  # parameters were averaged afterwards
    assert peer.value == 10 - 4.5 - 2
    peer.local.take(1)
    assert peer.averager.sent[0].tolist() == [2.0, 2.0] and peer.averager.weight == 16


@pytest.mark.parametrize("delayed", [False, True])
def test_a_skipped_round_leaves_its_progress_to_the_next_one(delayed: bool) -> None:
    peer = Peer(delayed)
    peer.batches(3)
    peer.local.take(1)
    peer.local.keep()
    peer.local.end_round(skipped=True)
    peer.change_outer(0.0)  # as after the end of background work
    assert peer.value == 7
    peer.batches(1)
    peer.local.take(1)
    assert peer.averager.sent[0].tolist() == [4.0, 4.0] and peer.averager.weight == 32
    peer.change_outer(-4.0)
    peer.local.take(1)
    assert peer.averager.weight == 0


class TwoFragments:
    """A peer with two parameters, one in each fragment, which move by -1 with each batch."""

    def __init__(self, delayed: bool = False, mixing: float | None = None) -> None:
        self.parameters = [torch.nn.Parameter(torch.tensor([10.0, 10.0, 10.0][:n])) for n in (3, 2)]
        rule = LocalStepsRule(4, 1.0, 0.0, "keep", fragments=2, mixing=mixing)
        self.averager: Any = Averager()
        inner = torch.optim.SGD(self.parameters, lr=1.0)
        self.local = LocalSteps(rule, inner, self.parameters, self.averager, delayed)
        self.outer = [parameter.detach().clone() for parameter in self.parameters]

    def batches(self, count: int) -> None:
        for _ in range(count):
            for parameter in self.parameters:
                parameter.grad = torch.ones_like(parameter)
            self.local.step(8)

    def change_outer(self, fragment: int, by: float) -> None:
        self.outer[fragment] = self.outer[fragment] + by
        self.local.adopt(self.outer)

    @property
    def values(self) -> list[float]:
        return [float(parameter.detach()[0]) for parameter in self.parameters]

    @property
    def sent(self) -> list[float]:
        return [float(tensor[0]) for tensor in self.averager.sent]


@pytest.mark.parametrize("delayed", [False, True])
def test_fragments_take_turns_and_keep_their_own_progress(delayed: bool) -> None:
    peer = TwoFragments(delayed)
    peer.batches(2)
    peer.local.take(2)
    assert (peer.sent, peer.averager.weight, peer.local.samples) == ([2.0, 0.0], 16, 16)
    peer.change_outer(0, -1.5)
    assert peer.values == [8.5, 8.0]
    peer.batches(3)
    peer.local.take(3)
    assert (peer.sent, peer.averager.weight, peer.local.samples) == ([0.0, 5.0], 40, 24)
    peer.local.keep()  # the averaging failed
    peer.local.end_round(skipped=True)
    peer.batches(1)
    peer.local.take(4)
    assert (peer.sent, peer.averager.weight) == ([4.0, 0.0], 32)
    peer.change_outer(0, 0.0)
    peer.local.take(5)
    assert (peer.sent, peer.averager.weight, peer.local.samples) == ([0.0, 6.0], 48, 0)


def test_the_steps_of_a_progress_are_all_since_its_last_average() -> None:
    """So that a norm by step is that of the steps that made the progress."""
    peer = TwoFragments()
    peer.batches(2)
    peer.local.take(2)
    assert peer.averager.steps == 2
    peer.change_outer(0, 0.0)
    peer.batches(3)
    peer.local.take(3)
    assert peer.averager.steps == 5  # of the other fragment, since the start
    peer.local.keep()
    peer.local.end_round(skipped=True)
    peer.batches(1)
    peer.local.take(5)
    assert peer.averager.steps == 6
    peer.local.put_back()
    assert (peer.averager.local_samples_accumulated, peer.averager.local_times_accumulated) == (
        8,
        1,
    )
    peer.local.take(5)
    assert (peer.averager.steps, peer.averager.weight) == (6, 48)


def test_a_fragment_is_mixed_with_its_average() -> None:
    peer = TwoFragments(delayed=True, mixing=0.25)
    peer.batches(2)
    peer.local.take(2)
    peer.batches(2)
    peer.change_outer(0, -3.0)
    assert peer.values == [0.25 * 6 + 0.75 * 7, 6.0]
    peer.change_outer(0, 1.0)  # parameters were averaged afterwards
    assert peer.values == [0.25 * 6 + 0.75 * 7 + 1, 6.0]
    peer.local.averager.local_samples_accumulated = 0
    peer.change_outer(0, -1.0)
    assert peer.values == [0.25 * 6 + 0.75 * 7, 6.0]


def test_an_outer_step_moves_one_fragment_only() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    outer = FragmentSGD(parameters, lr=1.0, momentum=0.5, nesterov=True)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    outer.indices = {1}
    outer.step()
    assert [float(p.detach()[0]) for p in parameters] == [1.0, -0.5]
    assert list(outer.state) == [parameters[1]]
    assert all(parameter.grad is not None for parameter in parameters)


def test_gradients_are_looked_at_between_steps_of_a_fragment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step of a fragment, in the background, hides the gradients of the others."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    outer = FragmentSGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    outer.indices, begun, ends = {0}, threading.Event(), threading.Event()
    averager: Any = SimpleNamespace(lock_optimizer=threading.Lock())

    def gradients() -> list[Any]:
        return [parameter.grad for parameter in parameters]

    def slow(*_: Any) -> None:
        begun.set()
        ends.wait(20)

    monkeypatch.setattr(torch.optim.SGD, "step", slow)
    before = gradients()

    def step() -> None:
        with averager.lock_optimizer:
            outer.step()

    with ThreadPoolExecutor() as threads:
        stepping = threads.submit(step)
        assert begun.wait(20) and gradients()[1] is None
        looking = threads.submit(RayhiveStateAverager.between_steps, averager, gradients)
        ends.set()
        stepping.result(20)
        assert all(a is b for a, b in zip(looking.result(20), before, strict=True))


def test_fragments_are_of_almost_equal_size_and_alike_for_all_peers() -> None:
    sizes = [640, 64, 4096, 64, 4096, 10, 300]
    found = split(sizes, 3)
    assert sorted(index for each in found for index in each) == list(range(len(sizes)))
    assert found == split(list(sizes), 3) == ((2,), (4,), (0, 1, 3, 5, 6))
    with pytest.raises(ValueError, match="8 fragments of 7 tensors"):
        split(sizes, 8)


def test_the_bytes_of_a_round_fall_with_the_fragments() -> None:
    def bytes_of(**values: Any) -> float:
        configuration = Configuration(local_steps=8, **values)
        swarm = SwarmConfig(peers=2)
        return round_traffic([(64, 10), (64, 10), (10,)], [], configuration, swarm).gradient_bytes

    assert bytes_of(fragments=2) == bytes_of() / 2
    assert bytes_of(fragments=2, codec="float16") == bytes_of() / 4
    assert Configuration(local_steps=8, fragments=2).round_size(64) == 256


def test_refused_progress_is_dropped() -> None:
    peer = Peer()
    peer.batches(3)
    peer.local.take(1)
    peer.local.end_round(skipped=True)
    assert peer.value == 10


@pytest.mark.parametrize("delayed", [False, True])
def test_parameters_that_are_not_finite_never_survive_a_round(delayed: bool) -> None:
    peer = Peer(delayed)
    peer.batches(2)
    peer.parameter.data[0] = torch.nan
    peer.local.take(1)
    peer.local.keep()
    if delayed:
        peer.batches(1)
        peer.change_outer(-1.0)
    else:
        peer.local.end_round(skipped=True)
    assert torch.equal(peer.parameter.detach(), peer.outer)


def test_a_download_moves_progress_that_is_kept_and_drops_the_rest() -> None:
    peer = Peer()
    peer.batches(2)
    peer.change_outer(5.0)
    assert peer.value == 13
    peer.local.drop()
    assert torch.equal(peer.parameter.detach(), peer.outer)


def test_a_joiner_begins_with_the_bits_of_the_outer_parameters() -> None:
    peer = Peer()
    downloaded = torch.tensor([0.1, 1 / 3])
    peer.local.adopt([downloaded])
    assert torch.equal(peer.parameter.detach(), downloaded)


def test_statistics_are_dropped_after_a_round_if_asked_to() -> None:
    peer = Peer(inner_state="reset")
    peer.inner.state[peer.parameter]["momentum_buffer"] = torch.ones(2)
    peer.local.take(1)
    peer.change_outer(0.0)
    peer.local.end_round(skipped=False)
    assert not peer.inner.state


def test_peers_show_the_outer_parameters_for_a_while() -> None:
    peer = Peer()
    peer.batches(2)
    optimizer: Any = type("Optimizer", (), {"local_steps": peer.local})()
    with with_common_parameters(optimizer), with_common_parameters(optimizer):
        assert peer.value == 10
    assert peer.value == 8
    assert common_parameters(optimizer)[0].tolist() == [10.0, 20.0]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"local_steps": 0}, {"local_steps"}),
        ({"local_steps": True, "outer_lr": 0.0}, {"local_steps", "outer_lr"}),
        ({"local_steps": 2, "outer_momentum": 1.0}, {"outer_momentum"}),
        ({"local_steps": 2, "inner_state": "kept"}, {"inner_state"}),
        ({"local_steps": 2, "fragments": 0, "mixing": 1.0}, {"fragments", "mixing"}),
        (
            {"local_steps": 2, "fragments": 2, "grad_averager_factory": PowerSGDGradientAverager},
            {"fragments"},
        ),
        ({"outer_lr": 0.5, "inner_state": "keep"}, {"outer_lr", "inner_state"}),
        (
            {"local_steps": 2, "use_local_updates": True, "reuse_grad_buffers": True},
            {"use_local_updates", "reuse_grad_buffers"},
        ),
        ({"use_local_updates": True}, {"use_local_updates"}),
        ({"local_steps": 2, "average_opt_statistics": ["exp_avg"]}, {"average_opt_statistics"}),
        ({"local_steps": 2, "grad_averager_factory": Averager}, {"grad_averager_factory"}),
    ],
)
def test_mistakes_are_told_at_once(options: dict[str, Any], keys: set[str]) -> None:
    names = ("local_steps", "outer_lr", "outer_momentum", "inner_state", "fragments", "mixing")
    given = [options.pop(name, None) for name in names]
    with pytest.raises(ConfigError) as found:
        LocalStepsRule.read(options, *given)
    assert {problem.key for problem in found.value.problems} == keys


def test_a_round_of_local_steps_fits_into_the_budget() -> None:
    study = {
        "name": "study",
        "workload": {"name": "digits"},
        "swarm": {"target_batch_size": 256},
        "space": {"local_steps": [None, 4, 16]},
        "budget": {"samples_per_replicate": 2048},
    }
    (problem,) = check_sweep(SweepConfig.model_validate(study))
    assert (problem.key, problem.value) == ("space.local_steps", 16)


def test_a_fault_strikes_after_as_many_samples() -> None:
    faults = tuple(
        PlannedFault(id=f"f{n}", kind="kill", who=("peer-0",), at=at)
        for n, at in enumerate((At(round=1), At(round=10), At(seconds=5.0), At(round=16)))
    )
    plan = FaultPlan(peers=2, faults=faults)
    assert plan.in_rounds_of(64, planned=64) == plan
    moved = plan.in_rounds_of(512, planned=64)
    assert [fault.at.round for fault in moved.faults] == [1, 2, None, 2]


@pytest.mark.parametrize(("first", "rounds", "then", "left"), [(6, 12, 1, 3), (9, 8, 2, 1)])
def test_a_fault_of_several_rounds_lasts_for_as_many_samples(
    first: int, rounds: int, then: int, left: int
) -> None:
    at, args = At(round=first), {"rounds": rounds, "factor": -1.0}
    one = PlannedFault(id="f0", kind="scaled_gradient", who=("peer-0",), at=at, args=args)
    (moved,) = FaultPlan(peers=2, faults=(one,)).in_rounds_of(512, planned=64).faults
    assert moved.at.round == then and moved.args == {"rounds": left, "factor": -1.0}


def test_parameters_travel_with_the_outer_momentum() -> None:
    from rayhive.spec import SwarmConfig

    def state(**values: Any) -> float:
        configuration = Configuration(average_state_every=1, **values)
        return round_traffic([(10, 4)], [], configuration, SwarmConfig(peers=2)).state_bytes

    assert state() == 160.0
    assert state(local_steps=4) == 320.0
    assert state(local_steps=4, outer_momentum=0.0) == 160.0
