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

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import hivemind
import torch
from hivemind.compression import NoCompression, RoleAdaptiveCompression
from hivemind.utils import get_logger

from rayhive.averaging.factory import takes_rules, with_our_averager
from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.averaging.optimizer_statistics import statistics
from rayhive.errors import ConfigError, Problem, unknown

logger = get_logger(__name__)

InnerState = Literal["keep", "reset", "average"]

#: Settings of the outer optimizer and of the inner state, which need ``local_steps``. The defaults
#: of the outer optimizer are those that the paper found best (section 3, "Outer optimizers").
DEFAULTS: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9, "inner_state": "keep"}


@dataclass(frozen=True)
class LocalStepsRule:
    """Settings of local steps.

    Attributes:
        steps: Batches of the swarm (``target_batch_size`` samples each) in a round.
        outer_lr: Learning rate of the outer optimizer. 1 without momentum sets the outer parameters
            to the mean of the local ones.
        outer_momentum: Nesterov momentum of the outer optimizer; 0 is plain SGD.
        inner_state: What a round does with the statistics of the inner optimizer: they stay each
            peer's own, are dropped, or are averaged over the peers.
    """

    steps: int
    outer_lr: float
    outer_momentum: float
    inner_state: InnerState

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any],
        local_steps: int | None,
        outer_lr: float | None,
        outer_momentum: float | None,
        inner_state: InnerState | None,
    ) -> LocalStepsRule | None:
        """Return the rule in the arguments of an optimizer; None without local steps.

        Raises:
            ConfigError: With all problems of the rule.
        """
        given: dict[str, Any] = {
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "inner_state": inner_state,
        }
        if problems := list(local_steps_problems({**options, **given, "local_steps": local_steps})):
            raise ConfigError(problems)
        if local_steps is None:
            return None
        chosen = {n: DEFAULTS[n] if value is None else value for n, value in given.items()}
        return cls(steps=int(local_steps), **chosen)

    def outer_optimizer(self, groups: Any) -> torch.optim.Optimizer:
        """Return the outer optimizer for parameter groups.

        With momentum m and averaged pseudo-gradient D: b = m b + D, and the parameters move by
        -lr (D + m b), Nesterov's momentum as in Sutskever et al. (2013).
        """
        momentum = float(self.outer_momentum)
        return torch.optim.SGD(groups, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)

    def outer_arguments(
        self, *, optimizer: Any, target_batch_size: int, params: Any = None, **others: Any
    ) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Split the arguments of an optimizer into its inner one and those of the outer one.

        Args:
            optimizer: The inner optimizer, or a function that makes it.
            target_batch_size: Samples of one batch of the swarm.
            params: Argument of that function.
            others: Further arguments.
        """
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(params)
        extra = list(others.pop("extra_tensors", ()))
        if self.inner_state == "average":
            averaged = [each for each in statistics(inner) if each.is_floating_point()]
            if not averaged:
                logger.warning("the inner optimizer has no statistics yet: none are averaged")
            extra += averaged
            codec = others.get("state_averaging_compression") or NoCompression()
            if not isinstance(codec, NoCompression):  # small second moments could become negative
                exact = RoleAdaptiveCompression(default=NoCompression(), parameter=codec)
                others["state_averaging_compression"] = exact
        others |= {
            "optimizer": self.outer_optimizer,
            "params": [{"params": list(group["params"])} for group in inner.param_groups],
            "offload_optimizer": True,
            "target_batch_size": target_batch_size * self.steps,
            "extra_tensors": extra,
            "average_opt_statistics": ("momentum_buffer",) if self.outer_momentum else (),
        }
        return inner, others


def local_steps_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find the problems of local steps among an optimizer's arguments."""
    steps = options.get("local_steps")
    if steps is None:
        for name in DEFAULTS:
            if options.get(name) is not None:
                yield Problem(name, options[name], "absent without local_steps")
        return
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        yield Problem("local_steps", steps, "a whole number, at least 1")
    given = {n: DEFAULTS[n] if options.get(n) is None else options[n] for n in DEFAULTS}
    if not _number(given["outer_lr"]) or not 0 < given["outer_lr"] < math.inf:
        yield Problem("outer_lr", given["outer_lr"], "a number greater than 0")
    if not _number(given["outer_momentum"]) or not 0 <= given["outer_momentum"] < 1:
        yield Problem("outer_momentum", given["outer_momentum"], "at least 0 and less than 1")
    if given["inner_state"] not in get_args(InnerState):
        yield unknown("inner_state", given["inner_state"], get_args(InnerState))
    yield from _excluded(options)


def _excluded(options: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("use_local_updates", "reuse_grad_buffers", "auxiliary"):
        if options.get(name):
            yield Problem(name, True, "False with local_steps")
    if names := options.get("average_opt_statistics"):
        yield Problem("average_opt_statistics", names, "absent with local_steps: see inner_state")
    factory = options.get("grad_averager_factory")
    if not takes_rules(with_our_averager(factory)):
        allowed = "absent with local_steps, or a class of rayhive's or hivemind's"
        yield Problem("grad_averager_factory", factory, allowed)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
        averager: Averager of pseudo-gradients. Its count of samples is that of the progress.
        delayed: Whether the peer goes on before the outer optimizer has stepped.
    """

    rule: LocalStepsRule
    inner: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]
    averager: RayhiveGradientAverager
    delayed: bool
    _start: list[torch.Tensor] = field(init=False)
    #: Parameters when the pseudo-gradient of the running round was taken; the parameters
    #: themselves, not a copy, if the peer waits for the round.
    _taken: Sequence[torch.Tensor] | None = field(default=None, init=False)
    _taken_samples: int = field(default=0, init=False)
    #: Samples of progress that skipped rounds have left.
    _carried: int = field(default=0, init=False)
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
        delayed = bool(optimizer.delay_optimizer_step)
        made = cls(rule, inner, averager.main_parameters, optimizer.grad_averager, delayed)
        averager.on_parameters = made.adopt
        return made

    def __post_init__(self) -> None:
        self._start = [each.detach().clone() for each in self.parameters]

    # -- batches -----------------------------------------------------------------------------------

    def step(self, samples: int) -> None:
        """Step the inner optimizer with the gradients of a batch, and count its samples."""
        self.inner.step()
        self.averager.local_samples_accumulated += samples

    # -- rounds ------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self) -> None:
        """Hand the pseudo-gradient to the averager, for a round that begins."""
        self._taken_samples = self.averager.local_samples_accumulated + self._carried
        pairs = zip(self._start, self.parameters, strict=True)
        self.averager.set_accumulated((a - b for a, b in pairs), self._taken_samples)
        copies = self.delayed and [each.detach().clone() for each in self.parameters]
        self._taken = copies or self.parameters

    @torch.no_grad()
    def adopt(self, outer: Sequence[torch.Tensor]) -> None:
        """Go on from outer parameters that have changed, with the progress of no round yet."""
        moved_from, self._taken = self._start if self._taken is None else self._taken, None
        if moved_from is not self._start:
            self._carried = 0
        kept = moved_from is not self.parameters and self._progressed
        for local, start, origin, new in zip(
            self.parameters, self._start, moved_from, outer, strict=True
        ):
            if kept:
                local.add_(new.to(local) - origin)
                start.copy_(new)
            else:
                local.copy_(new)
                start.copy_(local)
        if kept and not self._finite:
            self.drop()

    @property
    def _progressed(self) -> bool:
        return self.averager.local_samples_accumulated + self._carried > 0

    @property
    def _finite(self) -> bool:
        return all(bool(torch.isfinite(each).all()) for each in self.parameters)

    def keep(self) -> None:
        """Keep the progress that a skipped round has taken, for the next round."""
        if self._taken is not None and self._finite:
            self._taken, self._carried = None, self._taken_samples

    def end_round(self, skipped: bool) -> None:
        """Go on with the next round.

        Args:
            skipped: Whether the present one has not used the pseudo-gradient.
        """
        if skipped and self._taken is not None:
            self.drop()
        if self.rule.inner_state == "reset":
            self.inner.state.clear()

    @torch.no_grad()
    def drop(self) -> None:
        """Return to the outer parameters, without the progress that is in no round yet."""
        self._taken, self._carried = None, 0
        for local, start in zip(self.parameters, self._start, strict=True):
            local.copy_(start)

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
