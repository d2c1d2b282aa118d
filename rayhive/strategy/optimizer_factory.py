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

#: Key of the state of the optimizer that does local steps, in that of the outer one.
INNER_STATE = "inner"


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
    counts one step too many. Here the parameters and the counters are restored.
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

    Tensors that are shared with the averagers' processes are filled, not replaced.

    Args:
        optimizer: The swarm's optimizer.
        state: That of :func:`state_with_inner`, or the ``state_dict`` of a plain optimizer, which
            local steps load into the optimizer that steps the module.

    Returns:
        The round of the checkpoint; 0 for that of a plain optimizer.
    """
    local = optimizer.local_steps
    entries = dict(state["state"])
    round_ = int(entries.pop("local_epoch", 0))
    steps_module = {**state, "state": entries}
    outer = None
    if INNER_STATE in steps_module:
        outer, steps_module = steps_module, steps_module.pop(INNER_STATE)
    if local is not None and outer is not None:
        _load(optimizer.state_averager.optimizer, outer)
    _load(optimizer.state_averager.optimizer if local is None else local.inner, steps_module)
    return round_


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    with kept_in_place(optimizer):
        optimizer.load_state_dict(state)


def state_with_inner(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the swarm's optimizer for a checkpoint, see :func:`load_state`."""
    local = optimizer.local_steps
    return state if local is None else {**state, INNER_STATE: local.inner.state_dict()}
