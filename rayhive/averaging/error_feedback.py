"""Error feedback for lossy codecs: the errors of a round enter the next one.

Two kinds of errors arise where a round encodes, and each has one peer that owes it:

* A peer sends its gradient u of w samples as the decoded value c: it owes w(u - c).
* A reducer sends the average a of parts with the weights wᵢ as the decoded value b, which all peers
  apply: it owes (Σ wᵢ)(a - b), for all of them. It is the only peer that knows a.

A peer owes a sum over samples E. In its next round of w samples it contributes u = g + E/w, where g
is its gradient. Over all peers, with the applied gradient b:

    (Σ w) b + Σ E' = Σ E + Σ w g

so that what was applied and what is owed add up to the gradients of all samples, with any weights,
and over joins. A failed round changes nothing. The debt of a peer that dies is lost with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rayhive.averaging.allreduce_groups import DENSE
from rayhive.averaging.payload_policy import GroupRound, PayloadPolicy, counted, given_up
from rayhive.averaging.policy_thread import PolicyThread

Tensors = list[torch.Tensor]


class ErrorFeedback:
    """Errors that one peer owes, as sums over samples.

    Three copies of the gradients: the debt, the debt after the round under way or before the last
    one, and the tensors that the round averages. They are allocated in the first round, in the
    averager's process.

    Args:
        gradients: Tensors in the shapes of the gradients of every round.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._shapes = [gradient.shape for gradient in gradients]
        self._debt: Tensors = []
        self._entering = 0.0
        self.owed: Tensors = []
        self.entered: Tensors = []

    @property
    def debt(self) -> Tensors:
        """Sum over samples that this peer owes, by gradient, in float32."""
        return self._debt or [torch.zeros(shape) for shape in self._shapes]

    @torch.no_grad()
    def begin(self, gradients: Sequence[torch.Tensor], weight: float) -> Tensors:
        """Return the tensors that a round averages: the gradients and the debt per sample.

        The errors of the round are to be added to :attr:`owed`.

        Args:
            gradients: Means over the samples of this peer.
            weight: Number of its samples. With 0 the debt does not enter the round.
        """
        if not self._debt:
            self._debt, self.owed, self.entered = (
                [torch.zeros(shape) for shape in self._shapes] for _ in range(3)
            )
        self._entering = weight
        for debt, owed, entered, gradient in zip(
            self._debt, self.owed, self.entered, gradients, strict=True
        ):
            owed.zero_()
            entered.copy_(gradient)
            if weight:
                entered.add_(debt, alpha=1 / weight)
        return self.entered

    @torch.no_grad()
    def commit(self, gradients: Sequence[torch.Tensor]) -> None:
        """Replace gradients by the averages, and take over the errors; the debt is paid.

        Rounding to the type of the gradients is an error as well. The debt of a tensor whose errors
        are not finite stays as it was.
        """
        for gradient, entered, debt, owed in zip(
            gradients, self.entered, self._debt, self.owed, strict=True
        ):
            gradient.copy_(entered)
            if gradient.dtype != entered.dtype:
                owed.add_(entered.sub_(gradient.to(entered.dtype)), alpha=self._entering)
            if not bool(owed.sum().isfinite()):
                owed.copy_(debt)
            elif not self._entering:
                owed.add_(debt)
        self.undo()

    def undo(self) -> None:
        """Take back the last commit, if no round has begun since."""
        self._debt, self.owed = self.owed, self._debt


class FeedbackPayload(PayloadPolicy):
    """Policy that averages gradients with error feedback.

    A round is a transaction: gradients and debt change at its end or not at all, and a round whose
    step the trainer had given up by then is undone.

    Args:
        gradients: The averaged gradients.

    Attributes:
        feedback: The errors that this peer owes.
    """

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self.feedback = ErrorFeedback(gradients)
        self._thread = PolicyThread("feedback", sum(each.numel() for each in gradients))
        self._last_step: Future[Any] | None = None

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the one phase of a dense round."""
        return (DENSE,)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace gradients by their average, which pays the debts; on failure change nothing."""
        await self.undo_given_up(round_.step)
        entered = await self._thread.run(self.feedback.begin, tensors, counted(round_.weight))
        await round_.allreduce(DENSE, entered, self.feedback.owed)
        if not round_.auxiliary:
            await self._thread.run(self.feedback.commit, tensors, final=True)
            self._last_step = round_.step

    async def undo_given_up(self, current: Future[Any] | None = None) -> None:
        """Undo the last round if its step was given up before the trainer got its result."""
        step, self._last_step = self._last_step, None
        if given_up(step, current):
            self.feedback.undo()
