"""Local steps: peers step on their own between two rounds, and a round averages how far they got.

This is DiLoCo (Douillard et al., 2023, "DiLoCo: Distributed Low-Communication Training of Language
Models", arXiv:2311.08105, algorithm 1). Every peer i has the same *outer parameters* and its own
*local* ones. An inner optimizer steps the local parameters after each batch. A round then takes the
pseudo-gradient of each peer, outer minus local parameters, averages it over the swarm, and gives
the average to an outer optimizer, which steps the outer parameters. Local parameters start again
from these.

Here the pseudo-gradient takes the place of the gradient in all that a round does: codecs, PowerSGD,
error feedback, outlier filters and failures act on it. It has the weight of the samples of its
peer. The outer parameters are those of the state averager's offloaded optimizer, so that state
downloads, fingerprints and parameter averaging act on them and on the outer momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hivemind
import torch

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, type_of_sums
from rayhive.averaging.optimizer_statistics import statistics
from rayhive.compression.fragments import split
from rayhive.optim import gossip
from rayhive.optim.local_rule import FragmentSGD, LocalStepsRule


class _Work(NamedTuple):
    """Samples and inner steps behind a progress."""

    samples: int = 0
    steps: int = 0

    def plus(self, other: _Work) -> _Work:
        return _Work(self.samples + other.samples, self.steps + other.steps)

    def less(self, other: _Work) -> _Work:
        return _Work(self.samples - other.samples, self.steps - other.steps)


@dataclass
class LocalSteps:
    """Local parameters of a peer between two rounds.

    The *start* is the value of the outer parameters, in the type and on the device of the local
    ones, from which the progress that is in no round yet counts: progress = start - local. Every
    progress enters exactly one round: when the outer parameters change, local ones move by as much
    as the outer parameters differ from the start, or, if a round has used the progress up to some
    point, from the parameters at this point. Without delays this sets them to the outer ones.

    Attributes:
        rule: The settings.
        inner: The inner optimizer, which steps the module's own parameters.
        parameters: These parameters, in the order of the averagers.
        averager: Averager of pseudo-gradients. Its count of samples is that of the round.
        delayed: Whether the peer goes on before the outer optimizer has stepped.
        outer: The outer optimizer, if it steps one fragment in a round.
    """

    rule: LocalStepsRule
    inner: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]
    averager: RayhiveGradientAverager
    delayed: bool
    outer: FragmentSGD | None = None
    _members: Sequence[Sequence[int]] = field(init=False)
    _start: list[torch.Tensor] = field(init=False)
    #: Parameters of the running round when its pseudo-gradient was taken, by index; the parameters
    #: themselves, not copies, if the peer waits for the round.
    _taken: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _taken_work: _Work = field(default=_Work(), init=False)
    _fragment: int = field(default=0, init=False)
    #: Work of earlier rounds whose progress no round has used, by fragment.
    _carried: list[_Work] = field(init=False)
    #: Work since the round before.
    _work: _Work = field(default=_Work(), init=False)
    #: Local parameters while the module has the outer ones.
    _own: list[torch.Tensor] | None = field(default=None, init=False)

    @classmethod
    def of(
        cls, rule: LocalStepsRule, inner: torch.optim.Optimizer, optimizer: hivemind.Optimizer
    ) -> LocalSteps:
        """Return the local steps of a peer, and take over what its averager does to parameters.

        Args:
            rule: The settings.
            inner: The inner optimizer.
            optimizer: The swarm's optimizer, with its averagers.
        """
        averager = optimizer.state_averager
        made = cls(
            rule=rule,
            inner=inner,
            parameters=averager.main_parameters,
            averager=optimizer.grad_averager,
            delayed=bool(optimizer.delay_optimizer_step),
            outer=averager.optimizer if isinstance(averager.optimizer, FragmentSGD) else None,
        )
        averager.on_parameters = made.adopt
        if rule.pairs:
            gossip.begin(averager.optimizer)
            optimizer.tracker.swarm.several_groups = True
        return made

    def __post_init__(self) -> None:
        self._start = [each.detach().clone() for each in self.parameters]
        self._members = split([each.numel() for each in self.parameters], self.rule.fragments)
        self._carried = [_Work() for _ in self._members]

    @property
    def samples(self) -> int:
        """Samples of the last round that began."""
        return self._work.samples

    # -- batches -----------------------------------------------------------------------------------

    def step(self, samples: int) -> None:
        """Step the inner optimizer with the gradients of a batch, and count its samples."""
        self.inner.step()
        self.averager.local_samples_accumulated += samples
        self.averager.local_times_accumulated += 1

    # -- rounds ------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, round_: int) -> None:
        """Hand the pseudo-gradient of a round's fragment to the averager.

        Its weight is the number of samples since the fragment was averaged last.

        Args:
            round_: The round that begins.
        """
        averager, self._fragment = self.averager, self._of(round_)
        self._work = _Work(averager.local_samples_accumulated, averager.local_times_accumulated)
        self._carried = [carried.plus(self._work) for carried in self._carried]
        self._taken_work, self._carried[self._fragment] = self._carried[self._fragment], _Work()
        members = set(self._members[self._fragment])
        if self.rule.pairs:
            self.averager.set_accumulated(*gossip.sent(self.parameters, self._taken_work.samples))
        else:
            progress = (
                self._progress(index) if index in members else torch.zeros_like(local)
                for index, local in enumerate(self.parameters)
            )
            self.averager.set_accumulated(progress, *self._taken_work)
        self._taken = {
            index: self.parameters[index].detach().clone()
            if self.delayed
            else self.parameters[index]
            for index in members
        }
        if self.outer is not None:
            self.outer.indices = members

    def _progress(self, index: int) -> torch.Tensor:
        start = self._start[index]
        return start.to(type_of_sums(start)) - self.parameters[index]

    def _of(self, round_: int) -> int:
        return round_ % len(self._members)

    @torch.no_grad()
    def adopt(self, outer: Sequence[torch.Tensor]) -> None:
        """Go on from outer parameters that have changed, with the progress of no round yet."""
        with self._own_shown():
            self._adopt(outer)

    def _adopt(self, outer: Sequence[torch.Tensor]) -> None:
        taken, self._taken = self._taken, {}
        since = 0 if self._waits(taken) else self.averager.local_samples_accumulated
        for fragment, members in enumerate(self._members):
            mixed = self.rule.mixing is not None  # a part of used progress stays
            kept = mixed or since + self._carried[fragment].samples > 0
            for index in members:
                local, start, new = self.parameters[index], self._start[index], outer[index]
                origin = taken.get(index, start)
                if index in taken and self.rule.mixing is not None:
                    share = self.rule.mixing  # section 2.3, equation 4
                    start.copy_(new)
                    local.mul_(share).add_(start, alpha=1 - share)
                elif kept and origin is not local:
                    value = new.to(local, copy=True)  # read once: an averager may write meanwhile
                    local.add_(value - origin)
                    start.copy_(value)
                else:
                    local.copy_(new)
                    start.copy_(local)
        if not self._finite:
            self._begin_anew()

    def _waits(self, taken: Mapping[int, torch.Tensor]) -> bool:
        """Return whether a round has taken all progress, and this peer has waited for it."""
        return bool(taken) and not self.delayed

    @property
    def _finite(self) -> bool:
        return all(bool(torch.isfinite(each).all()) for each in self.parameters)

    def put_back(self) -> None:
        """Undo :meth:`take`, because other peers have averaged the round without this one."""
        self._taken = {}
        before = [carried.less(self._work) for carried in self._carried]
        before[self._fragment] = self._taken_work.less(self._work)
        self._carried, self.averager.local_samples_accumulated = before, self._work.samples
        self.averager.local_times_accumulated = self._work.steps

    def keep(self) -> None:
        """Keep the progress that a skipped round has taken, for the next round."""
        if self._taken and self._finite:
            self._taken, self._carried[self._fragment] = {}, self._taken_work

    def end_round(self, skipped: bool) -> None:
        """Go on with the next round.

        Args:
            skipped: Whether the present one has not used the pseudo-gradient.
        """
        if not self._finite:
            self._begin_anew()
        elif skipped and self._taken:
            self._return(self._members[self._fragment])
        if self.rule.inner_state == "reset":
            self.inner.state.clear()

    def drop(self) -> None:
        """Return to the outer parameters, without the progress that is in no round yet."""
        self._carried = [_Work() for _ in self._members]
        with self._own_shown():
            self._return(range(len(self.parameters)))

    def _begin_anew(self) -> None:
        """Drop what a batch has made infinite: progress, and statistics of the inner optimizer."""
        self.drop()
        if self.rule.inner_state == "average":  # averagers hold these very tensors
            with torch.no_grad():
                for each in statistics(self.inner):
                    each.zero_()
        else:
            self.inner.state.clear()
        self.averager.local_samples_accumulated = self.averager.local_times_accumulated = 0

    @torch.no_grad()
    def _return(self, indices: Iterable[int]) -> None:
        self._taken = {}
        for index in indices:
            self.parameters[index].copy_(self._start[index])

    # -- outer parameters --------------------------------------------------------------------------

    @property
    def shows_outer(self) -> bool:
        """Whether the module has the outer parameters at present."""
        return self._own is not None

    @property
    def outer_parameters(self) -> Sequence[torch.Tensor]:
        """The outer parameters that this peer has adopted last."""
        return self._start

    @torch.no_grad()
    def show_outer(self) -> None:
        """Give the module the outer parameters, until :meth:`hide_outer`; no step may follow."""
        if self._own is None:
            self._own = [each.detach().clone() for each in self.parameters]
            for local, start in zip(self.parameters, self._start, strict=True):
                local.copy_(start)

    @contextmanager
    def _own_shown(self) -> Iterator[None]:
        """Give the module its local parameters in the body, which changes them."""
        shown = self.shows_outer
        self.hide_outer()
        yield
        if shown:
            self.show_outer()

    @torch.no_grad()
    def hide_outer(self) -> None:
        """Give the module its local parameters back."""
        own, self._own = self._own, None
        if own is not None:
            for local, value in zip(self.parameters, own, strict=True):
                local.copy_(value)


def common_parameters(optimizer: Any) -> Sequence[torch.Tensor]:
    """Return the parameters that the peers of a swarm have in common after a round.

    Args:
        optimizer: The optimizer of a peer, with local steps or without.
    """
    local: LocalSteps | None = getattr(optimizer, "local_steps", None)
    found = optimizer.state_averager.main_parameters if local is None else local.outer_parameters
    return list(found)


@contextmanager
def with_common_parameters(optimizer: Any) -> Iterator[None]:
    """Give the module of a peer the :func:`common_parameters` in the body."""
    local: LocalSteps | None = getattr(optimizer, "local_steps", None)
    if local is None or local.shows_outer:
        yield
        return
    local.show_outer()
    try:
        yield
    finally:
        local.hide_outer()
