"""Settings of local steps (:mod:`rayhive.optim.local_steps`), and the outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from hivemind.utils import get_logger

from rayhive.averaging.factory import made_by, takes_over_state, takes_rules, with_our_averager
from rayhive.averaging.optimizer_statistics import are_quantised, statistics
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.optim import gossip

logger = get_logger(__name__)

InnerState = Literal["keep", "reset", "average"]

#: Settings of the outer optimizer and of the inner state, which need ``local_steps``. The defaults
#: of the outer optimizer are those that the paper found best (section 3, "Outer optimizers").
DEFAULTS: dict[str, Any] = {
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "inner_state": "keep",
    "fragments": 1,
    "mixing": None,
    "group_size": None,
}


#: Allowed in place of hivemind's ``use_local_updates``, which the strategy writes as local steps.
USE_LOCAL_STEPS = "absent: local_steps=1 with outer_lr=1 and outer_momentum=0 does what it is for"


class FragmentSGD(torch.optim.SGD):
    """SGD that steps some of its parameters at a time, and leaves the momentum of the others.

    Attributes:
        indices: Indices of the parameters to step; None steps all.
    """

    indices: Set[int] | None = None

    def step(self, closure: Any = None) -> Any:
        """Step the parameters of :attr:`indices`; see torch."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters]
        for index, parameter in enumerate(parameters):
            if self.indices is not None and index not in self.indices:
                parameter.grad = None
        try:
            return super().step(closure)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


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
        fragments: Parts of the parameters; each round averages one, in turn.
        mixing: Share of the local value in the parameters from which a fragment goes on after its
            round, as in Streaming DiLoCo; None moves them with the outer parameters.
        group_size: Peers of a group; 2 averages in random pairs (:mod:`rayhive.optim.gossip`), None
            over all peers.
    """

    steps: int
    outer_lr: float
    outer_momentum: float
    inner_state: InnerState
    fragments: int = 1
    mixing: float | None = None
    group_size: int | None = None

    @property
    def pairs(self) -> bool:
        """Whether a round averages in random pairs."""
        return self.group_size is not None

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any],
        local_steps: int | None,
        outer_lr: float | None,
        outer_momentum: float | None,
        inner_state: InnerState | None,
        fragments: int | None = None,
        mixing: float | None = None,
        group_size: int | None = None,
    ) -> LocalStepsRule | None:
        """Return the rule in the arguments of an optimizer; None without local steps.

        Raises:
            ConfigError: With all problems of the rule.
        """
        given: dict[str, Any] = {
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "inner_state": inner_state,
            "fragments": fragments,
            "mixing": mixing,
            "group_size": group_size,
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
        if self.pairs:
            return gossip.outer_optimizer(groups, self.outer_lr, momentum)
        kind = torch.optim.SGD if self.fragments == 1 else FragmentSGD
        return kind(groups, lr=self.outer_lr, momentum=momentum, nesterov=momentum > 0)

    def outer_arguments(
        self, *, optimizer: Any, target_batch_size: int, params: Any = None, **others: Any
    ) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Split the arguments of an optimizer into its inner one and those of the outer one.

        Args:
            optimizer: The inner optimizer, or a function that makes it.
            target_batch_size: Samples of one batch of the swarm.
            params: Argument of that function.
            others: Further arguments.

        Raises:
            ConfigError: There are more fragments than tensors, or quantised statistics to average.
        """
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(params)
        tensors = sum(len(group["params"]) for group in inner.param_groups)
        if self.fragments > tensors:
            allowed = f"at most {tensors}, the number of tensors of the module"
            raise ConfigError(Problem("fragments", self.fragments, allowed))
        extra = list(others.pop("extra_tensors", ()))
        if self.inner_state == "average":
            if are_quantised(inner):
                allowed = f"keep or reset: the statistics of {type(inner).__name__} are quantised"
                raise ConfigError(Problem("inner_state", "average", allowed))
            averaged = [each for each in statistics(inner) if each.is_floating_point()]
            if not averaged:
                logger.warning("the inner optimizer has no statistics yet: none are averaged")
            extra += averaged
        if self.fragments > 1:
            factory = with_our_averager(others.get("grad_averager_factory"))
            others["grad_averager_factory"] = partial(factory, fragments=self.fragments)
        if self.pairs:
            factory = with_our_averager(others.get("grad_averager_factory"))
            others["grad_averager_factory"] = partial(factory, pairs=True)
        others |= {
            "optimizer": self.outer_optimizer,
            "params": [{"params": list(group["params"])} for group in inner.param_groups],
            "offload_optimizer": True,
            "target_batch_size": max(1, target_batch_size * self.steps // self.fragments),
            "extra_tensors": extra,
            "average_opt_statistics": ("momentum_buffer",) if self.outer_momentum else (),
        }
        return inner, others


def local_steps_problems(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Find the problems of local steps among an optimizer's arguments."""
    steps = options.get("local_steps")
    if options.get("use_local_updates"):
        allowed = "False (or absent) with local_steps" if steps is not None else USE_LOCAL_STEPS
        yield Problem("use_local_updates", True, allowed)
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
    yield from _fragment_problems(given["fragments"], given["mixing"])
    yield from _excluded(options)
    yield from gossip.problems({**options, **given})
    averager = made_by(options.get("grad_averager_factory"))
    if given["fragments"] != 1 and takes_rules(averager) and takes_over_state(averager):
        yield Problem("fragments", given["fragments"], "1 (or absent) with PowerSGD")


def _fragment_problems(fragments: Any, mixing: Any) -> Iterator[Problem]:
    if not isinstance(fragments, int) or isinstance(fragments, bool) or fragments < 1:
        yield Problem("fragments", fragments, "a whole number, at least 1")
    if mixing is not None and (not _number(mixing) or not 0 <= mixing < 1):
        yield Problem("mixing", mixing, "at least 0 and less than 1, or None")


def _excluded(options: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("reuse_grad_buffers", "auxiliary"):
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
