"""Gradient clipping, once per round.

Clipping is meant for the gradient that moves the weights: the average over the swarm. Lightning
would clip the gradient of each micro-batch, which is a small noisy part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from rayhive.errors import Problem
from rayhive.strategy.overrides import Overrides
from rayhive.strategy.validation import StrategyError


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
        raise StrategyError(
            Problem(
                "gradient_clip_val",
                trainer.gradient_clip_val,
                f"absent with 16-mixed and a fused {type(optimizer).__name__}, which unscales by "
                "itself: use fused=False",
            )
        )


def clip_in_rounds(
    trainer: Trainer,
    module: LightningModule,
    optimizer: Optimizer,
    overrides: Overrides,
    keep_errors: Callable[[Callable[..., None]], Callable[..., None]],
) -> Any:
    """Move the module's clipping from every micro-batch to every round.

    ``module.configure_gradient_clipping`` is called with the torch optimizer, which holds the
    averaged gradients.

    Args:
        trainer: The trainer, for its clipping settings.
        module: The trained module.
        optimizer: The torch optimizer that steps once per round.
        overrides: Restores the module's methods at the end.
        keep_errors: Wraps a function that may run in a background thread.

    Returns:
        A handle; its ``remove()`` ends the clipping.
    """
    clip = module.configure_gradient_clipping

    def before_step(stepping: Optimizer, *_: Any) -> None:
        clip(
            stepping,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    overrides.set("configure_gradient_clipping", lambda *_args, **_kwargs: None)
    return optimizer.register_step_pre_hook(keep_errors(before_step))
