"""Loss scaling and gradient clipping of gradients that are accumulated over a round.

hivemind usually adds the gradients of each micro-batch to buffers of its own. With
``precision="16-mixed"`` they are unscaled before that, as in any training. With
``reuse_grad_buffers`` they accumulate in ``parameter.grad``, scaled, and are unscaled once, at the
start of the round.

Clipping is meant for the gradient that moves the weights: the average over the swarm. Lightning
would clip the gradient of each micro-batch, which is a small noisy part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import hivemind
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from rayhive.strategy.arguments import StrategyError

_ABSENT = object()


class BatchScaler(hivemind.GradScaler):
    """Scaler that unscales the gradients of each micro-batch and drops one that overflows.

    hivemind's scaler does nothing before the round, so scaled gradients would be averaged.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale."""
        GradScaler.unscale_(self, optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the swarm's optimizer, which counts the micro-batch, unless it overflowed."""
        return GradScaler.step(self, optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Adapt the scale."""
        GradScaler.update(self, new_scale)


class RoundScaler(hivemind.GradScaler):
    """Scaler that unscales the gradients of a whole round."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the swarm's optimizer; in a round it steps the inner one with this scaler."""
        if self._is_running_global_step and not isinstance(optimizer, hivemind.Optimizer):
            return super().step(optimizer, *args, **kwargs)
        # torch passes a scaler on only with a deprecation warning
        optimizer.step(*args, grad_scaler=self, **kwargs)
        self._optimizer_states_to_reset.add(id(optimizer))
        return False


def swarm_scaler(scaler: Any, reuse_grad_buffers: bool) -> Any:
    """Return a scaler for a swarm with the state of ``scaler``.

    Args:
        scaler: The precision plugin's scaler; None if it does not scale.
        reuse_grad_buffers: Whether gradients accumulate in ``parameter.grad``.

    Raises:
        StrategyError: It has a class of the user's own that cannot unscale whole rounds.
    """
    if scaler is None or isinstance(scaler, (BatchScaler, RoundScaler)):
        return scaler
    if type(scaler) not in (GradScaler, torch.cuda.amp.GradScaler, hivemind.GradScaler):
        if not reuse_grad_buffers or isinstance(scaler, hivemind.GradScaler):
            return scaler
        raise StrategyError.about(
            "reuse_grad_buffers",
            True,
            f"False with a {type(scaler).__name__}: only a hivemind.GradScaler can leave "
            "gradients scaled until the round",
        )
    made = (RoundScaler if reuse_grad_buffers else BatchScaler)(
        device=getattr(scaler, "_device", "cuda"), enabled=scaler.is_enabled()
    )
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made


@contextlib.contextmanager
def overridden(target: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object, not of its class, in the body."""
    before = vars(target).get(name, _ABSENT)
    vars(target)[name] = method
    try:
        yield
    finally:
        vars(target).pop(name, None)
        if before is not _ABSENT:
            vars(target)[name] = before


def clips(trainer: Trainer, module: LightningModule) -> bool:
    """Return whether the trainer's settings or the module clip gradients."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", module)


def refuse_fused(trainer: Trainer, optimizer: Optimizer) -> None:
    """Refuse a fused optimizer under loss scaling, before clipping fails in the first round.

    Raises:
        StrategyError: The optimizer unscales gradients inside its kernel.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise StrategyError.about(
            "gradient_clip_val",
            trainer.gradient_clip_val,
            f"absent with 16-mixed and a fused {type(optimizer).__name__}, which unscales by "
            "itself: use fused=False",
        )


@contextlib.contextmanager
def clipping_in_rounds(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    keep_errors: Callable[[Callable[..., None]], Callable[..., None]],
) -> Iterator[None]:
    """Move the module's clipping from every micro-batch to every round, in the body.

    ``module.configure_gradient_clipping`` is called with the torch optimizer, which holds the
    averaged gradients.

    Args:
        trainer: The trainer, for its clipping settings.
        module: The trained module.
        optimizer: The torch optimizer that steps once per round.
        keep_errors: Wraps a function that may run in a background thread.
    """
    clip = module.configure_gradient_clipping

    def before_step(stepping: Optimizer, *_: Any) -> None:
        clip(
            stepping,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    with (
        overridden(module, "configure_gradient_clipping", lambda *_args, **_kwargs: None),
        optimizer.register_step_pre_hook(keep_errors(before_step)),
    ):
        yield
