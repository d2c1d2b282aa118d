"""What broke, and how fast it healed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rayhive.columns import FAULTS
from rayhive.metrics.group import MetricGroup, Row
from rayhive.metrics.impact import impacts, rejoins
from rayhive.metrics.losses import samples_lost
from rayhive.metrics.stats import percentile
from rayhive.metrics.timeline import Timeline


class Faults(MetricGroup):
    """Columns of the fault plan. All None where nothing was planned and nothing fired.

    * ``faults_planned``, ``faults_fired``, ``faults_verified``: faults in the plan, those with a
      ``fault_fired``, those with a ``fault_verified`` that is ok.
    * ``detect_p50_s``, ``detect_p95_s``, ``recover_p50_s``, ``recover_p95_s`` [s]: percentiles
      over the faults that fired and of which it was seen; see
      :func:`rayhive.metrics.impact.impacts`.
    * ``rejoin_p50_s``, ``rejoin_p95_s`` [s]: the same over the peers that came while the others
      trained; see :func:`rayhive.metrics.impact.rejoins`.
    * ``censored``: faults of which the detection, the recovery or the rejoin of a peer that they
      asked for was not seen before the end, and further peers that came and never contributed.
    * ``samples_lost``: samples computed / not committed, and not on their way into a round when
      training ended either; see :func:`rayhive.metrics.losses.samples_lost`.
    * ``state_transfer_bytes`` [B]: what peers downloaded to take over others' state. None if one
      did not say.
    * ``invariants_violated``: ``invariant`` events that are not ok. None if nobody looked.

    Of a replicate only:

    * ``detect_s``, ``recover_s``, ``rejoin_s``: the seconds that the percentiles are of, in the
      order of time, separated by spaces, so that those of several replicates can be pooled.
    """

    columns: ClassVar[tuple[str, ...]] = tuple(column.name for column in FAULTS)
    replicate_columns: ClassVar[tuple[str, ...]] = ("detect_s", "recover_s", "rejoin_s")

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        checked = timeline.of("invariant")
        row: Row = dict.fromkeys((*self.columns, *self.replicate_columns))
        if checked:
            row["invariants_violated"] = sum(not event["ok"] for event in checked)
        plan, fired = timeline.spec.plan, timeline.of("fault_fired")
        if not fired and not (plan and plan.faults):
            return row
        faults, joined = impacts(timeline), rejoins(timeline)
        unseen = {item.fault for item in faults if item.detect_s is None or item.recover_s is None}
        unseen |= {item.cause or item.life for item in joined if item.seconds is None}
        verified = {e["fault"] for e in timeline.of("fault_verified") if e["ok"]}
        return {
            **row,
            "faults_planned": None if plan is None else len(plan.faults),
            "faults_fired": len({event["fault"] for event in fired}),
            "faults_verified": len(verified),
            **_percentiles("detect", (item.detect_s for item in faults)),
            **_percentiles("recover", (item.recover_s for item in faults)),
            **_percentiles("rejoin", (item.seconds for item in joined)),
            "censored": len(unseen),
            "samples_lost": samples_lost(timeline),
            "state_transfer_bytes": _transferred(timeline),
        }


def _percentiles(name: str, found: Iterable[float | None]) -> Row:
    seconds = [value for value in found if value is not None]
    return {
        f"{name}_s": seconds_text(seconds),
        f"{name}_p50_s": percentile(seconds, 50),
        f"{name}_p95_s": percentile(seconds, 95),
    }


def seconds_text(seconds: Iterable[float]) -> str | None:
    """Return seconds as a text that :func:`text_seconds` reads back; None of none."""
    return " ".join(map(repr, seconds)) or None


def text_seconds(texts: Iterable[str]) -> list[float]:
    """Return the seconds of all texts together."""
    return [float(item) for text in texts for item in text.split()]


def _transferred(timeline: Timeline) -> int | None:
    total = 0
    for event in timeline.of("state_loaded"):
        if event.get("received_bytes") is None:
            return None
        total += event["received_bytes"]
    return total
