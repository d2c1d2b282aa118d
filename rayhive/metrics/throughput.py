"""How much training was done in the time."""

from __future__ import annotations

from typing import ClassVar

from rayhive.metrics.group import MetricGroup, Row, ratio
from rayhive.metrics.live_capacity import live_share
from rayhive.metrics.stats import percentile
from rayhive.metrics.timeline import Timeline


class Throughput(MetricGroup):
    """Columns from samples and the training clock.

    The training clock starts when all peers are ready and stands still during evaluations.

    * ``samples_per_s`` [1/s]: committed samples of the swarm / its training clock at the end.
    * ``round_p50_s``, ``round_p95_s`` [s]: percentiles of the time from one transition to the
      next, of all peers together: computing, waiting, averaging and stepping. Each peer's first
      is left out: the group has yet to form and the code to warm up, and a run is as long as its
      budget, so its share is arbitrary.
    * ``goodput``: committed / computed samples.
    * ``retention``: ``samples_per_s`` / that of the no-fault twin (:mod:`rayhive.metrics.twins`);
      None without a twin.
    * ``retention_normalised``: ``retention`` / ``live_share``.

    Of a replicate only:

    * ``live_share``: peers that there were, on average over the training, / peers that began
      (:func:`rayhive.metrics.live_capacity.live_share`).
    """

    columns: ClassVar[tuple[str, ...]] = (
        "samples_per_s",
        "round_p50_s",
        "round_p95_s",
        "goodput",
        "retention",
        "retention_normalised",
    )
    replicate_columns: ClassVar[tuple[str, ...]] = ("live_share",)

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        transitions = timeline.by_peer("transition").values()
        seconds = [event["seconds"] for events in transitions for event in events[1:]]
        committed = timeline.committed()
        return {
            "samples_per_s": ratio(committed, timeline.clock_s),
            "round_p50_s": percentile(seconds, 50),
            "round_p95_s": percentile(seconds, 95),
            "goodput": ratio(committed, timeline.computed),
            "retention": None,
            "retention_normalised": None,
            "live_share": live_share(timeline),
        }
