"""Construction of the swarm's optimizer from the one that the module configured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from torch.optim import LBFGS, Optimizer

from rayhive.averaging.optimizer_statistics import kept_in_place
from rayhive.errors import Problem
from rayhive.strategy.arguments import StrategyError
from rayhive.strategy.checkpoint_layout import OUTER_STATE

#: Key of the round among the statistics, where hivemind has it.
ROUND = "local_epoch"


def check_configured(optimizers: list[Any]) -> Optimizer:
    """Return the module's only optimizer.

    Raises:
        StrategyError: There is none or more than one, or a swarm cannot run it.
    """
    if len(optimizers) != 1:
        raise several_optimizers(len(optimizers))
    optimizer: Optimizer = optimizers[0]
    if not any(group["params"] for group in optimizer.param_groups):
        allowed = "one optimizer with parameters to train"
        raise StrategyError.about("configure_optimizers", None, allowed)
    if isinstance(optimizer, LBFGS):
        allowed = "an optimizer that steps without a closure"
        raise StrategyError.about("configure_optimizers", "LBFGS", allowed)
    if any(each.is_complex() for group in optimizer.param_groups for each in group["params"]):
        allowed = "real parameters, such as torch.view_as_real of them"
        raise StrategyError.about("configure_optimizers", "complex parameters", allowed)
    return optimizer


def several_optimizers(count: int | str) -> StrategyError:
    """Return the error of a module with several optimizers."""
    allowed = "one optimizer. Hivemind only supports training with one optimizer."
    return StrategyError.about("configure_optimizers", f"{count} optimizers", allowed)


def leave_out_frozen(optimizer: Optimizer) -> None:
    """Remove frozen parameters from the optimizer.

    Averaged gradients are dense: a frozen parameter would get a gradient of zeros instead of
    none, and its weight would decay.
    """
    left_out = 0
    for group in optimizer.param_groups:
        kept = [parameter for parameter in group["params"] if parameter.requires_grad]
        left_out += len(group["params"]) - len(kept)
        group["params"][:] = kept
    if left_out:
        rank_zero_warn(
            f"{left_out} frozen parameters are not trained or averaged, even if they are thawed "
            "later in this fit."
        )


def recreate(original: Optimizer) -> Callable[[Any], Optimizer]:
    """Return a function that makes an optimizer like ``original`` for other tensors.

    The function takes parameter groups. Its result has the class of ``original`` and keeps the
    hyper-parameters of each group.

    Raises:
        StrategyError: The class needs an argument that is not among its defaults.
    """
    cls, defaults = type(original), original.defaults
    parameters = list(inspect.signature(cls).parameters.values())
    named = {parameter.name for parameter in parameters}
    missing = [
        parameter.name
        for parameter in parameters[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in defaults
    ]
    if missing:
        raise StrategyError.about(
            "configure_optimizers",
            cls.__name__,
            f"an optimizer that can be re-created; {', '.join(missing)} of this one is not among "
            "its defaults (without delays and offload_optimizer it is used as it is)",
        )

    def build(groups: Any) -> Optimizer:
        given = [dict(group) for group in groups]
        arguments = {name: value for name, value in defaults.items() if name in named}
        if "capturable" in arguments:  # CUDA graphs cannot hold tensors on the host
            arguments["capturable"] = False
            for group in given:
                group["capturable"] = False
        optimizer = cls([dict(group) for group in given], **arguments)
        for made, wanted in zip(optimizer.param_groups, given, strict=True):
            made.update({key: value for key, value in wanted.items() if key != "params"})
        initialise_state(optimizer)
        return optimizer

    return build


def extra_tensor_problems(extra: Sequence[Any], device: torch.device) -> list[Problem]:
    """Return the problems of extra tensors for a module on ``device``."""
    found: dict[str, str] = {}
    for item in extra:
        if not isinstance(item, torch.Tensor):
            kind = f"a {type(item).__name__}"
            found[kind] = "tensors, or a function of the module that returns tensors"
            continue
        if item.is_complex():
            found[str(item.dtype)] = "floating-point tensors, integers and booleans"
        if item.device != device:
            found[f"tensors on {item.device}"] = (
                f"tensors on {device}: pass a function of the module, such as "
                "lambda module: list(module.buffers()), as moving a module replaces buffers"
            )
    return [Problem("extra_tensors", value, allowed) for value, allowed in found.items()]


def initialise_state(optimizer: Optimizer) -> None:
    """Create the state tensors that a fresh optimizer would create in its first step.

    hivemind needs them to exist. It creates them by a step with zero gradients, after which Adam
    counts one step too many. Here the parameters and the counters are restored. SGD with
    ``dampening`` applies it in the first step too, which torch does not.
    """
    states = optimizer.state.values()
    if any(isinstance(value, torch.Tensor) for state in states for value in state.values()):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p, p.grad, p.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    decay = NoDecay(optimizer.param_groups)
    optimizer.step()
    decay.lift(optimizer.param_groups)
    with torch.no_grad():
        for parameter, gradient, value in before:
            parameter.copy_(value)
            parameter.grad = gradient
        for state in states:
            for name, start in (("step", 0), ("mu_product", 1)):
                if isinstance(state.get(name), torch.Tensor):
                    state[name].fill_(start)
                elif name in state:
                    state[name] = start


class NoDecay:
    """Suspends weight decay during a step that only creates optimizer state.

    :func:`initialise_state` makes such a step, and hivemind makes one for an optimizer without any
    state.

    Args:
        groups: The parameter groups.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._decays = [group.get("weight_decay") for group in groups]
        for group in groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0

    def lift(self, groups: list[dict[str, Any]]) -> None:
        """Restore the weight decay of each group."""
        for group, decay in zip(groups, self._decays, strict=True):
            if decay is not None:
                group["weight_decay"] = decay


def load_state(optimizer: Any, state: dict[str, Any]) -> int:
    """Restore the state of the swarm's optimizer from a checkpoint, without changing ``state``.

    Tensors that are shared with the averagers' processes are filled, not replaced. The settings of
    an outer optimizer stay those of the present run.

    Args:
        optimizer: The swarm's optimizer.
        state: That of :func:`state_for_checkpoint`, or the ``state_dict`` of a plain optimizer.

    Returns:
        The round of the checkpoint; 0 for that of a plain optimizer.
    """
    local, swarm = optimizer.local_steps, optimizer.state_averager.optimizer
    entries = dict(state["state"])
    round_ = int(entries.pop(ROUND, 0))
    steps_module = swarm if local is None else local.inner
    if entries:  # a parameter that was frozen then begins with statistics of its own
        entries = {**steps_module.state_dict()["state"], **entries}
    with kept_in_place(steps_module):
        steps_module.load_state_dict({**state, "state": entries})
    if local is not None:
        _fill_statistics(swarm, state.get(OUTER_STATE, {}))
    return round_


@torch.no_grad()
def _fill_statistics(optimizer: Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Set the statistics that an optimizer and a saved state have in common, by parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in saved.get(index, {}).items():
            own = optimizer.state[parameter].get(name)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                own.copy_(value)


def state_for_checkpoint(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer that steps the module, for a checkpoint.

    With local steps it holds the statistics of the outer optimizer under :data:`OUTER_STATE`, which
    a plain optimizer ignores.

    Args:
        optimizer: The swarm's optimizer.
        state: Its ``state_dict``, with the round at :data:`ROUND` of the statistics.
    """
    local = optimizer.local_steps
    if local is None:
        return state
    inner, outer = local.inner.state_dict(), dict(state["state"])
    round_ = {ROUND: outer.pop(ROUND)} if ROUND in outer else {}
    return {**inner, "state": {**inner["state"], **round_}, OUTER_STATE: outer}
