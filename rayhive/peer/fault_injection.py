"""Faults that a peer commits itself, in the rounds that its plan names.

Each act on gradients is one small function. It changes what this peer has accumulated, in place,
just before it enters the round's all-reduce; the peer itself then knows no better. A ``sabotaged``
event with what was measured before and after proves that it happened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

import rayhive.faults  # noqa: F401 - registers the kinds, which know their parameters
from rayhive.averaging.accumulator import mean_scale
from rayhive.registry import FAULTS, Registry
from rayhive.spec.fault_plan import PlannedFault
from rayhive.strategy.clock_skew import SkewedClock

Tensors: TypeAlias = Sequence[torch.Tensor]
#: Gets what was accumulated, the parameters of the fault, and the oldest gradients that are kept.
Act: TypeAlias = Callable[[Tensors, Any, Tensors], None]

ACTS: Registry[Act] = Registry("act of sabotage")


@ACTS.register("nan_gradient")
def fill_with_nan(gradients: Tensors, args: Any, past: Tensors) -> None:
    """Make one tensor NaN, as an overflow in a layer does."""
    max(gradients, key=torch.Tensor.numel).fill_(math.nan)


@ACTS.register("scaled_gradient")
def scale(gradients: Tensors, args: Any, past: Tensors) -> None:
    """Multiply by ``factor``, as a loss without its mean does."""
    for gradient in gradients:
        gradient.mul_(args.factor)


@ACTS.register("sign_flip")
def flip(gradients: Tensors, args: Any, past: Tensors) -> None:
    """Climb instead of descending."""
    for gradient in gradients:
        gradient.neg_()


@ACTS.register("stale_gradient")
def put_back(gradients: Tensors, args: Any, past: Tensors) -> None:
    """Send what was accumulated ``age`` rounds ago once more."""
    for gradient, old in zip(gradients, past, strict=True):
        gradient.copy_(old)


class FaultInjection:
    """What one peer does to itself.

    Args:
        faults: What is planned for it; kinds that it does not commit itself are left out.
        emit: Where its events go.
        seconds: Time since training started [s].
        skew: The clock of this peer; needed for ``clock_skew`` only.
    """

    def __init__(
        self,
        faults: Sequence[PlannedFault],
        emit: Callable[..., None],
        seconds: Callable[[], float],
        skew: SkewedClock | None = None,
    ) -> None:
        self._faults = [fault for fault in faults if FAULTS.get(fault.kind).inside]
        self._emit, self._seconds, self._skew = emit, seconds, skew
        self._args = {
            fault.id: FAULTS.get(fault.kind).Args.model_validate(fault.args)
            for fault in self._faults
        }
        self._times = dict.fromkeys(self._args, 0)
        ages = [self._args[f.id].age for f in self._faults if f.kind == "stale_gradient"]
        self._past: deque[tuple[int, Tensors]] = deque(maxlen=max(ages, default=0))
        self._corrupt: PlannedFault | None = None

    def attach(self, optimizer: Any) -> None:
        """Let the optimizer of this peer ask before each round; without faults, do nothing."""
        if self._faults:
            optimizer.before_round = self.before_round
            optimizer.state_averager.on_serving = self.serving

    def before_round(self, round_: int, averager: Any) -> None:
        """Do what is planned for a round whose gradients are accumulated."""
        gradients, scale = list(averager._grad_accumulators()), mean_scale(averager)
        now = {id_ for fault in self._faults if self._is_due(fault, round_) for id_ in [fault.id]}
        kept = _means(gradients, scale) if self._past.maxlen else ()
        for fault in self._faults:
            if fault.id not in now:
                continue
            if fault.kind in ACTS:
                self._act(fault, round_, gradients, scale)
            else:
                self._begin(fault, round_)
        if kept:
            self._past.append((round_, kept))

    def _is_due(self, fault: PlannedFault, round_: int) -> bool:
        if self._times[fault.id] >= self._args[fault.id].rounds:
            return False
        if fault.at.round is not None:
            return round_ >= fault.at.round
        return self._seconds() >= (fault.at.seconds or 0.0)

    @torch.no_grad()
    def _act(self, fault: PlannedFault, round_: int, gradients: Tensors, scale: float) -> None:
        args, what = self._args[fault.id], {}
        past: Tensors = ()
        if fault.kind == "stale_gradient":
            age = min(args.age, len(self._past))
            if not age:
                return  # it has computed nothing yet that could be old: in the next round
            of_round, means = self._past[-age]
            past, what = [mean / (scale or 1.0) for mean in means], {"of_round": of_round}
        before = [gradient.detach().clone() for gradient in gradients]
        ACTS.get(fault.kind)(gradients, args, past)
        self._times[fault.id] += 1
        self._report(fault, round_, **what, **_compared(before, gradients))

    def _begin(self, fault: PlannedFault, round_: int) -> None:
        """Commit what lasts."""
        self._times[fault.id] = self._args[fault.id].rounds
        if fault.kind == "clock_skew":
            assert self._skew is not None
            self._report(fault, round_, **self._skew.set(self._args[fault.id].seconds))
        elif fault.kind == "corrupt_state":
            self._corrupt = fault
            self._report(fault, round_, **self._args[fault.id].model_dump())

    @torch.no_grad()
    def serving(self, tensors: Tensors) -> Tensors:
        """Return what a joiner gets in place of the tensors of this peer's state."""
        fault = self._corrupt
        if fault is None:
            return tensors
        args = self._args[fault.id]
        factor = math.nan if args.what == "nan" else args.factor
        served = [t * factor if t.is_floating_point() else t for t in tensors]
        self._report(fault, None, served=True, **_compared(tensors, served))
        return served

    def _report(self, fault: PlannedFault, round_: int | None, **what: Any) -> None:
        self._emit("sabotaged", fault=fault.id, round=round_, what={"act": fault.kind, **what})


def _means(gradients: Tensors, scale: float) -> Tensors:
    return [gradient.detach() * scale for gradient in gradients]


def _compared(before: Tensors, after: Tensors) -> Mapping[str, float]:
    """Return both norms, and the cosine between the two."""
    pairs = [
        (a.double().flatten(), b.double().flatten())
        for a, b in zip(before, after, strict=True)
        if a.is_floating_point()
    ]
    norms = [math.sqrt(sum(float(pair[side] @ pair[side]) for pair in pairs)) for side in (0, 1)]
    product = norms[0] * norms[1]
    dot = sum(float(a @ b) for a, b in pairs)
    cosine = dot / product if product else 0.0
    return {"norm_before": norms[0], "norm_after": norms[1], "cosine": cosine}
