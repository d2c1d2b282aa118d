"""Columns of the settings under which a replicate ran."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rayhive.columns import Column, Row, in_group
from rayhive.events import PeerReady
from rayhive.metrics.folds import Common
from rayhive.metrics.group import MetricGroup
from rayhive.spec import AXES, Link, SwarmConfig
from rayhive.timeline import Timeline

_setting = partial(Column, type="text", fold=Common(), tells_apart=True, condition=True)
#: Columns of the axes of a study.
_AXES = tuple(replace(axis.column, fold=Common(), tells_apart=True) for axis in AXES)
_NO_AXES: Row = dict.fromkeys(axis.name for axis in AXES)


class Settings(MetricGroup):
    """Columns from the replicate's spec.

    * ``configuration``: the configuration's label, or that of the baseline; a column per axis: its
      value, None for a baseline.
    * ``baseline``: name of the baseline that trained instead of the swarm.
    * ``scenario``, ``workload``, ``peers``: as in the study.
    * ``data``: source of the data that the peers reported in ``peer_ready``, ``real`` or
      ``generated``; several are joined. None before a peer was ready. It does not
      separate rows, so a replicate that failed early belongs to the row of its configuration.
    * ``link``: shaping of the links for each class of nodes; None where nothing is shaped.
    """

    columns = in_group(
        "configuration",
        _setting("configuration", "Stable name of the configuration", condition=False),
        Column(
            "baseline",
            "Name of the baseline, if the row is one",
            type="text",
            fold=Common(),
            tells_apart=True,
            in_table=False,  # the configuration says it
        ),
        _setting("scenario", "Fault scenario"),
        _setting("workload", "Workload that was trained"),
        Column(
            "data",
            "`real`, `generated` without the real data set, or `own`",
            type="text",
            fold=Common(),
        ),
        *_AXES,
        _setting("peers", "Peers in the swarm", type="count"),
        _setting("link", "Shaping of the peers' links"),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        spec = timeline.spec
        data = {event.data for event in timeline.of(PeerReady) if event.data}
        return {
            "configuration": spec.label,
            "baseline": spec.baseline,
            "scenario": spec.scenario,
            "workload": spec.workload.label,
            "data": "; ".join(sorted(data)) or None,
            **(dict(spec.configuration) if spec.baseline is None else _NO_AXES),
            "peers": spec.swarm.peers,
            "link": _link(spec.swarm),
        }


def _link(swarm: SwarmConfig) -> str | None:
    """Return the shaping of the links in words; None where nothing is shaped."""
    classes = {name: item.link for name, item in (swarm.node_classes or {}).items()}
    if not any(classes.values()):
        return None
    return "; ".join(f"{name}: {_shape(link)}" for name, link in sorted(classes.items()))


def _shape(link: Link | None) -> str:
    if link is None:
        return "unshaped"
    rate = [] if link.rate_mbit is None else [f"{link.rate_mbit:g} Mbit/s"]
    loss = [f"{100 * link.loss:g} % lost"] if link.loss else []
    return ", ".join([*rate, f"{link.delay_ms:g} ms", *loss])
