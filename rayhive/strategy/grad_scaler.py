"""Loss scaling for ``precision="16-mixed"`` with gradients that are accumulated over a round.

hivemind usually adds the gradients of each micro-batch to buffers of its own. They are unscaled
before that, as in any training. With ``reuse_grad_buffers`` they accumulate in ``parameter.grad``,
scaled, and are unscaled once, at the start of the round.
"""

from __future__ import annotations

from typing import Any

import hivemind
import torch
from torch.amp.grad_scaler import GradScaler

from rayhive.errors import Problem
from rayhive.strategy.validation import StrategyError


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
        raise StrategyError(
            Problem(
                "reuse_grad_buffers",
                True,
                f"False with a {type(scaler).__name__}: only a hivemind.GradScaler can leave "
                "gradients scaled until the round",
            )
        )
    made = (RoundScaler if reuse_grad_buffers else BatchScaler)(
        device=getattr(scaler, "_device", "cuda"), enabled=scaler.is_enabled()
    )
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made
