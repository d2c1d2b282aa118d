"""The swarm's optimizer is the module's, in every hyper-parameter and in its first step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from rayhive.optim import gossip
from rayhive.optim.local_rule import LocalStepsRule
from rayhive.strategy import optimizer_factory
from rayhive.strategy.arguments import StrategyError
from rayhive.strategy.checkpoint_layout import CheckpointLayout
from rayhive.strategy.gradients import overridden
from rayhive.strategy.schedulers import unscheduled

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.02, betas=(0.5, 0.7), eps=1e-3, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.02, weight_decay=0.3, maximize=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.02),
    "radam": lambda p: optim.RAdam(p, lr=0.02),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.02),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.02, weight_decay=0.1),
}


def groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    first, second = model.children()
    return [
        {"params": list(first.parameters()), **options},
        {"params": list(second.parameters()), "lr": 0.5},
    ]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).tolist()


@pytest.mark.parametrize("name", MAKERS)
def test_a_prepared_optimizer_steps_as_a_fresh_one(name: str) -> None:
    """hivemind's own preparation is a step with zero gradients, which these would count."""
    fresh, prepared = model(), model()
    optimizer = MAKERS[name](groups(prepared, weight_decay=0.2))
    weights = [p.detach().clone() for p in prepared.parameters()]
    optimizer_factory.initialise_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, prepared.parameters(), strict=True))
    assert all(p.grad is None for p in prepared.parameters())
    assert optimizer.param_groups[0].get("weight_decay") == 0.2
    expected = train(fresh, MAKERS[name](groups(fresh, weight_decay=0.2)))
    assert train(prepared, optimizer) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_a_recreated_optimizer_is_equal(name: str) -> None:
    module = model()
    original = MAKERS[name](groups(module, weight_decay=0.2))
    optim.lr_scheduler.LinearLR(original, start_factor=0.1)
    given = [unscheduled(group) for group in original.param_groups]
    others = [torch.zeros_like(p).requires_grad_() for p in module.parameters()]
    moved = [dict(group, params=[others.pop(0) for _ in group["params"]]) for group in given]
    made = optimizer_factory.recreate(original)(moved)
    assert type(made) is type(original)
    assert made.defaults == original.defaults
    assert [g["lr"] for g in made.param_groups] == [g["initial_lr"] for g in original.param_groups]
    for mine, theirs in zip(made.param_groups, original.param_groups, strict=True):
        skipped = {"params", "lr", "initial_lr"}
        assert {k: v for k, v in mine.items() if k not in skipped} == {
            k: v for k, v in theirs.items() if k not in skipped
        }
    assert not {id(p) for g in made.param_groups for p in g["params"]} & {
        id(p) for p in module.parameters()
    }


def test_an_optimizer_that_cannot_be_recreated_is_refused() -> None:
    class Needy(optim.SGD):
        def __init__(self, params: Any, model_size: int) -> None:
            super().__init__(params, lr=0.1)

    with pytest.raises(StrategyError, match="model_size"):
        optimizer_factory.recreate(Needy(model().parameters(), model_size=3))


def test_a_recreated_optimizer_is_not_capturable() -> None:
    original = optim.Adam(model().parameters(), lr=0.1)
    original.defaults["capturable"] = original.param_groups[0]["capturable"] = True
    made = optimizer_factory.recreate(original)(
        [unscheduled(group) for group in original.param_groups]
    )
    assert made.param_groups[0]["capturable"] is False


def test_only_one_usable_optimizer_is_taken() -> None:
    module = model()
    good = optim.SGD(module.parameters(), lr=0.1)
    assert optimizer_factory.check_configured([good]) is good
    message = "Hivemind only supports training with one optimizer."
    for several in ([], [good, good]):
        with pytest.raises(StrategyError, match=message):
            optimizer_factory.check_configured(several)
    with pytest.raises(StrategyError, match="closure"):
        optimizer_factory.check_configured([optim.LBFGS(module.parameters())])
    empty = optim.SGD(module.parameters(), lr=0.1)
    empty.param_groups[0]["params"] = []
    with pytest.raises(StrategyError, match="parameters to train"):
        optimizer_factory.check_configured([empty])


def test_frozen_parameters_are_left_out() -> None:
    module = model()
    module[0].requires_grad_(False)
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="2 frozen parameters"):
        optimizer_factory.leave_out_frozen(optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in module[1].parameters()
    ]


def adam_of(module: torch.nn.Module, frozen: int | None = None) -> optim.Adam:
    """Return an optimizer of two groups after three steps, of which one parameter is frozen."""
    for place, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(place != frozen)
    weight, *others = module.parameters()
    optimizer = optim.Adam([{"params": [weight]}, {"params": others}], lr=0.1)
    train(module, optimizer)
    return optimizer


@pytest.mark.filterwarnings("ignore:1 frozen parameters")
@pytest.mark.parametrize(("before", "now"), [(None, None), (1, 1), (0, 0), (1, None), (None, 1)])
def test_checkpoints_have_the_places_of_frozen_parameters(
    before: int | None, now: int | None
) -> None:
    """Those of a swarm and of a plain optimizer, and with other parameters frozen afterwards."""
    saved = adam_of(model(), before)
    whole = saved.state_dict()
    layout = CheckpointLayout.of(saved)
    optimizer_factory.leave_out_frozen(saved)
    own = saved.state_dict()
    assert layout.whole(own) == whole and layout.reduced(whole) == own
    assert layout.reduced(own) == own  # of an earlier version

    plain = adam_of(model(), now)
    plain.load_state_dict(whole)
    ours = adam_of(model(), now)
    layout = CheckpointLayout.of(ours)
    optimizer_factory.leave_out_frozen(ours)
    swarm = mock.Mock(local_steps=None)
    swarm.state_averager.optimizer = ours
    optimizer_factory.load_state(swarm, layout.reduced(whole))
    parameters = [p for group in ours.param_groups for p in group["params"]]
    wanted = [p for group in saved.param_groups for p in group["params"]]
    assert [float(ours.state[p]["step"]) for p in parameters] == [3.0] * len(parameters)
    if before == now:
        for mine, theirs in zip(parameters, wanted, strict=True):
            assert torch.equal(ours.state[mine]["exp_avg"], saved.state[theirs]["exp_avg"])


def test_loading_fills_the_tensors_that_are_shared() -> None:
    module, other = model(), model()
    ours, theirs = (optim.Adam(m.parameters(), lr=0.1) for m in (module, other))
    optimizer_factory.initialise_state(ours)
    train(other, theirs)
    shared = [state["exp_avg"] for state in ours.state.values()]
    swarm = mock.Mock(local_steps=None)
    swarm.state_averager.optimizer = ours
    saved = theirs.state_dict()
    saved["state"]["local_epoch"] = 7
    assert optimizer_factory.load_state(swarm, saved) == 7
    assert saved["state"]["local_epoch"] == 7  # the checkpoint is not changed
    for state, tensor, wanted in zip(
        ours.state.values(), shared, theirs.state.values(), strict=True
    ):
        assert state["exp_avg"] is tensor
        assert torch.equal(tensor, wanted["exp_avg"])
        assert state["step"] == wanted["step"] == 3
    del saved["state"]["local_epoch"]
    assert optimizer_factory.load_state(swarm, saved) == 0


PAIRS = {"group_size": 2}
RULES: list[dict[str, Any] | None] = [None, {}, {"momentum": 0.0}, {"lr": 1.0}, PAIRS]


def swarm_of(rule: dict[str, Any] | None, steps: int = 0) -> Any:
    """Return the optimizer of a peer with AdamW, without local steps or with those of a rule."""
    module = model()
    inner = optim.AdamW(module.parameters(), lr=1e-3)
    optimizer_factory.initialise_state(inner)
    if steps:
        train(module, inner, steps)
    if rule is None:
        return SimpleNamespace(local_steps=None, state_averager=SimpleNamespace(optimizer=inner))
    options = {"lr": 0.7, "momentum": 0.9, "group_size": None, **rule}
    chosen = LocalStepsRule(
        4, options["lr"], options["momentum"], "keep", group_size=options["group_size"]
    )
    copies = [torch.nn.Parameter(p.detach().clone()) for p in module.parameters()]
    outer = chosen.outer_optimizer([{"params": copies}])
    optimizer_factory.initialise_state(outer)
    if chosen.pairs:
        gossip.begin(outer)
    for state in outer.state.values():
        if isinstance(state.get("momentum_buffer"), torch.Tensor):
            state["momentum_buffer"].fill_(float(steps))
    local = SimpleNamespace(inner=inner)
    return SimpleNamespace(local_steps=local, state_averager=SimpleNamespace(optimizer=outer))


def checkpoint_of(swarm: Any, round_: int) -> dict[str, Any]:
    state = swarm.state_averager.optimizer.state_dict()
    state["state"]["local_epoch"] = round_  # as hivemind does
    return optimizer_factory.state_for_checkpoint(swarm, state)


@pytest.mark.parametrize("after", RULES)
@pytest.mark.parametrize("before", RULES)
def test_a_checkpoint_resumes_with_and_without_local_steps(
    before: dict[str, Any] | None, after: dict[str, Any] | None
) -> None:
    saved, swarm = checkpoint_of(swarm_of(before, steps=3), 5), swarm_of(after)
    outer = swarm.state_averager.optimizer
    settings = [{**group, "params": None} for group in outer.param_groups]
    assert optimizer_factory.load_state(swarm, saved) == 5
    assert [{**group, "params": None} for group in outer.param_groups] == settings
    inner = outer if swarm.local_steps is None else swarm.local_steps.inner
    assert inner.param_groups[0]["lr"] == 1e-3
    assert all(float(state["step"]) == 3 for state in inner.state.values())
    if after is not None and after.get("momentum") != 0:
        had = before is not None and before.get("momentum") != 0
        for state in outer.state.values():
            assert bool((state["momentum_buffer"] == (3.0 if had else 0.0)).all())


@pytest.mark.parametrize("rule", RULES)
def test_a_plain_optimizer_loads_the_checkpoint_of_a_swarm(rule: dict[str, Any] | None) -> None:
    module = model()
    plain = optim.AdamW(module.parameters(), lr=0.5)
    plain.load_state_dict(checkpoint_of(swarm_of(rule, steps=3), 5))
    assert plain.param_groups[0]["lr"] == 1e-3
    train(module, plain)
    assert float(plain.state[next(module.parameters())]["step"]) > 3


class Target:
    def method(self) -> str:
        return "class"


def test_overridden_methods_are_restored() -> None:
    target, own = Target(), Target()
    own.method = lambda: "own"  # type: ignore[method-assign]
    for item, before in ((target, "class"), (own, "own")):
        with overridden(item, "method", lambda: "replaced"):
            assert item.method() == "replaced"
        assert item.method() == before
    assert vars(target) == {}
