"""Throughput: samples and rounds per time."""

from __future__ import annotations

from rayhive.columns import Column, Row, in_group
from rayhive.events import NodesShared, Transition
from rayhive.metrics.folds import Reduced
from rayhive.metrics.group import (
    MetricGroup,
    averaged,
    maximized,
    maximized_factor,
    minimized_factor,
    number,
    ratio,
)
from rayhive.metrics.live_capacity import live_share
from rayhive.metrics.participation import participation
from rayhive.metrics.stats import percentile
from rayhive.timeline import Timeline


class Throughput(MetricGroup):
    """Columns from samples and the training clock.

    The training clock starts when all peers are ready and stands still during evaluations.

    * ``samples_per_s`` [1/s]: committed samples of the swarm / its training clock at the end.
    * ``round_p50_s``, ``round_p95_s`` [s]: percentiles of the time from one transition to the
      next, over all peers together: computing, waiting, averaging and stepping. The first of each
      peer is left out: it includes the formation of the first group and the warm-up of code, and
      its weight would depend on the length of the run.
    * ``goodput``: committed / computed samples.
    * ``participation``: mean over the rounds of the share of the live peers that took part
      (:func:`rayhive.metrics.participation.participation`).
    * ``retention``: ``samples_per_s`` / that of the no-fault twin; None without a twin.
    * ``retention_normalised``: ``retention`` / ``live_share``.
    * ``live_share``: mean number of peers during the training / number that began
      (:func:`rayhive.metrics.live_capacity.live_share`).
    * ``nodes_shared``: other replicates that used a node of this one while it started or trained;
      in a row of the table, the most of any replicate. Times and rates measured beside others are
      not comparable with those of a replicate that had its nodes to itself.
    """

    columns = (
        *in_group(
            "throughput",
            maximized_factor(
                "samples_per_s", "Committed samples per second of training time", "1/s"
            ),
            minimized_factor(
                "round_p50_s", "Median overhead-inclusive time of the global step", "s"
            ),
            minimized_factor("round_p95_s", "95th percentile of the same", "s"),
            maximized("goodput", "Committed samples / computed samples"),
            maximized("participation", "Share of the live peers that took part in a round"),
            maximized_factor("retention", "samples_per_s / the twin's", stage="twin"),
            maximized_factor(
                "retention_normalised", "retention / live share of peers", stage="twin"
            ),
        ),
        averaged("live_share", "Mean number of peers / number that began"),
        Column(
            "nodes_shared",
            "Other replicates on the same nodes at the same time",
            type="count",
            fold=Reduced(max, failed=True),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        transitions = timeline.by_peer(Transition).values()
        seconds = [event.seconds for events in transitions for event in events[1:]]
        committed = timeline.committed()
        return {
            "samples_per_s": ratio(committed, timeline.clock_s),
            "round_p50_s": percentile(seconds, 50),
            "round_p95_s": percentile(seconds, 95),
            "goodput": ratio(committed, timeline.computed),
            "participation": participation(timeline),
            "live_share": live_share(timeline),
            "nodes_shared": len({r for e in timeline.of(NodesShared) for r in e.replicates}),
        }

    def compare(self, row: Row, twin: Row) -> Row:
        """Return the columns that compare a replicate with its twin."""
        retention = ratio(number(row, "samples_per_s"), number(twin, "samples_per_s"))
        return {
            "retention": retention,
            "retention_normalised": ratio(retention, number(row, "live_share")),
        }
