"""Axes of a study, one file each.

A new axis is one file with one subclass of :class:`~rayhive.spec.axes.base.Axis` and one line
here; ``docs/extending.md`` shows one. ``tests/contract/test_axis_contract.py`` tests every axis.
"""

from __future__ import annotations

from rayhive.registry import Registry
from rayhive.spec.axes.base import Axis, Values

__all__ = ["AXES", "DRAW_ORDER", "REGISTERED", "Axis", "Values", "draw_order"]

#: Classes of the axes by name, in the order of their columns.
REGISTERED: Registry[type[Axis]] = Registry("axis", in_order=True)
REGISTERED.register_lazy("codec", "rayhive.spec.axes.codec:Codec")
REGISTERED.register_lazy("threshold", "rayhive.spec.axes.threshold:Threshold")
REGISTERED.register_lazy("top_k", "rayhive.spec.axes.top_k:TopK")
REGISTERED.register_lazy("error_feedback", "rayhive.spec.axes.error_feedback:ErrorFeedback")
REGISTERED.register_lazy("powersgd_rank", "rayhive.spec.axes.powersgd_rank:PowerSGDRank")
REGISTERED.register_lazy(
    "min_compression_ratio", "rayhive.spec.axes.min_compression_ratio:MinCompressionRatio"
)
REGISTERED.register_lazy("delay", "rayhive.spec.axes.delay:Delay")
REGISTERED.register_lazy(
    "average_state_every", "rayhive.spec.axes.average_state_every:AverageStateEvery"
)
REGISTERED.register_lazy("state_codec", "rayhive.spec.axes.state_codec:StateCodec")
REGISTERED.register_lazy("min_peers", "rayhive.spec.axes.min_peers:MinPeers")
REGISTERED.register_lazy("grace_s", "rayhive.spec.axes.grace_s:GraceS")
REGISTERED.register_lazy("local_steps", "rayhive.spec.axes.local_steps:LocalSteps")
REGISTERED.register_lazy("outer_lr", "rayhive.spec.axes.outer_lr:OuterLR")
REGISTERED.register_lazy("outer_momentum", "rayhive.spec.axes.outer_momentum:OuterMomentum")
REGISTERED.register_lazy("inner_state", "rayhive.spec.axes.inner_state:InnerState")
REGISTERED.register_lazy("fragments", "rayhive.spec.axes.fragments:Fragments")
REGISTERED.register_lazy("mixing", "rayhive.spec.axes.mixing:Mixing")
REGISTERED.register_lazy("group_size", "rayhive.spec.axes.group_size:GroupSize")


def draw_order(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return axes sorted so that every axis follows its dependencies.

    The sort is stable, because the draws of a sampler depend on the order.

    Raises:
        ValueError: An axis depends on one that is not registered, or on itself.
    """
    order: list[Axis] = []
    while len(order) < len(axes):
        drawn = {axis.name for axis in order}
        for axis in axes:
            if axis not in order and drawn.issuperset((*axis.depends_on, *axis.drawn_after)):
                order.append(axis)
                break
        else:
            rest = ", ".join(axis.name for axis in axes if axis not in order)
            raise ValueError(f"axes that depend on each other or on an unknown axis: {rest}")
    return tuple(order)


#: The axes in the order of their columns.
AXES: tuple[Axis, ...] = tuple(axis() for _, axis in REGISTERED.items())
#: The axes in the order in which their values are chosen and applied.
DRAW_ORDER: tuple[Axis, ...] = draw_order(AXES)
