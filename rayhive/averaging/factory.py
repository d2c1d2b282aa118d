"""Choice and capabilities of a peer's averagers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.errors import Problem

#: Replacements of hivemind's own averagers, which a user's factory may name.
_OURS: dict[Any, Any] = {
    GradientAverager: RayhiveGradientAverager,
    PowerSGDGradientAverager: RayhivePowerSGDAverager,
}


def with_our_averager(factory: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return ``factory`` with hivemind's averager class replaced by rayhive's.

    The user's own classes are returned unchanged.
    """
    if isinstance(factory, partial):
        return partial(with_our_averager(factory.func), *factory.args, **factory.keywords)
    made = GradientAverager if factory is None else factory
    return _OURS.get(made, made)  # type: ignore[no-any-return]


def made_by(factory: Any) -> Any:
    """Return the class whose averagers a factory makes, rayhive's in place of hivemind's own."""
    ours = with_our_averager(factory)
    return ours.func if isinstance(ours, partial) else ours


def takes_rules(factory: Any) -> bool:
    """Return whether a factory's averagers have an outlier filter and aggregation rules."""
    made = factory.func if isinstance(factory, partial) else factory
    return isinstance(made, type) and issubclass(made, MeasuredAverager)


def takes_extras(factory: Any) -> bool:
    """Return whether the rounds of a factory's averagers include extra tensors.

    Those of a class that loads its tensors in a way of its own do not.
    """
    made = made_by(factory)
    if not (isinstance(made, type) and issubclass(made, RayhiveGradientAverager)):
        return False
    ours = RayhiveGradientAverager.load_accumulators_into_averager_
    return made.load_accumulators_into_averager_ is ours


def factory_problems(factory: Any, outlier_filter: str, aggregation: str) -> Iterator[Problem]:
    """Find rules that a factory's averagers do not support."""
    ours = with_our_averager(factory)
    made = ours.func if isinstance(ours, partial) else ours
    if not takes_rules(ours):
        allowed = "{} with a grad_averager_factory of your own, which supports no other"
        for name, value, default in (
            ("outlier_filter", outlier_filter, "norm"),
            ("aggregation", aggregation, "mean"),
        ):
            if value != default:
                yield Problem(name, value, allowed.format(default))
    elif made is RayhivePowerSGDAverager and aggregation != "mean":
        yield Problem(
            "aggregation", aggregation, "mean with PowerSGD, whose factors have to be averaged"
        )


def takes_over_state(averager: type[DecentralizedAverager]) -> bool:
    """Return whether averagers of a class use the state of another peer.

    An averager of plain gradients has no lasting state: hivemind downloads another peer's
    gradients and drops them.
    """
    does_nothing = (
        MeasuredAverager.load_state_from_peers,
        DecentralizedAverager.load_state_from_peers,
    )
    return averager.load_state_from_peers not in does_nothing
