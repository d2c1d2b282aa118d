"""What broke, and how fast it healed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rayhive.columns import FAULTS
from rayhive.metrics.fault_impact import impacts, rejoins
from rayhive.metrics.group import MetricGroup, Row
from rayhive.metrics.lost_samples import samples_lost
from rayhive.metrics.stats import Time, censored_percentile
from rayhive.metrics.timeline import Timeline

#: Times of single faults, of which a row has percentiles over all of them.
TIMES: tuple[str, ...] = ("detect", "stall", "recover", "rejoin")


class Faults(MetricGroup):
    """Columns of the fault plan. All None where nothing was planned and nothing fired.

    * ``faults_planned``, ``faults_fired``, ``faults_verified``: faults in the plan, those with a
      ``fault_fired``, those with a ``fault_verified`` that is ok.
    * ``detect_p50_s``, ``detect_p95_s``, ``stall_p50_s``, ``stall_p95_s``, ``recover_p50_s``,
      ``recover_p95_s`` [s]: percentiles over all faults that fired; see
      :func:`rayhive.metrics.fault_impact.impacts`. What was not seen before the end took longer
      than it was looked for; where a percentile depends on how much longer, it is None
      (:func:`rayhive.metrics.stats.censored_percentile`).
    * ``rejoin_p50_s``, ``rejoin_p95_s`` [s]: the same over the peers that came while the others
      trained; see :func:`rayhive.metrics.fault_impact.rejoins`.
    * ``censored``: faults of which the detection, the recovery or the rejoin of a peer that they
      asked for was not seen before the end, and further peers that came and never contributed.
    * ``samples_lost``: samples computed / not committed, and not on their way into a round when
      training ended either; see :func:`rayhive.metrics.lost_samples.samples_lost`.
    * ``state_transfer_bytes`` [B]: what peers downloaded to take over others' state. None if one
      did not say.
    * ``invariants_violated``: ``invariant`` events that are not ok. None if nobody looked.

    Of a replicate only:

    * ``detect_s``, ``stall_s``, ``recover_s``, ``rejoin_s``: the seconds that the percentiles are
      of, in the order of time, separated by spaces, so that those of several replicates can be
      pooled. ``>`` marks what was not seen until then.
    """

    columns: ClassVar[tuple[str, ...]] = tuple(column.name for column in FAULTS)
    replicate_columns: ClassVar[tuple[str, ...]] = tuple(f"{name}_s" for name in TIMES)

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
            **percentiles("detect", (_time(item.detect_s, item.observed_s) for item in faults)),
            **percentiles("stall", (item.stall for item in faults)),
            **percentiles("recover", (_time(item.recover_s, item.observed_s) for item in faults)),
            **percentiles("rejoin", (_time(item.seconds, item.observed_s) for item in joined)),
            "censored": len(unseen),
            "samples_lost": samples_lost(timeline),
            "state_transfer_bytes": _transferred(timeline),
        }


def percentiles(name: str, found: Iterable[Time | None]) -> Row:
    """Return the columns of one kind of time: the times themselves, p50 and p95."""
    times = [time for time in found if time is not None]
    row: Row = {f"{name}_s": times_text(times)}
    for percent in (50, 95):
        value = censored_percentile(times, percent)
        known = value is not None and not value.censored
        row[f"{name}_p{percent}_s"] = value.seconds if value is not None and known else None
    return row


def _time(seconds: float | None, observed_s: float) -> Time:
    return Time(observed_s, censored=True) if seconds is None else Time(seconds)


def times_text(times: Iterable[Time]) -> str | None:
    """Return times as a text that :func:`text_times` reads back; None of none."""
    return " ".join(f"{'>' * time.censored}{time.seconds!r}" for time in times) or None


def text_times(texts: Iterable[str]) -> list[Time]:
    """Return the times of all texts together."""
    return [
        Time(float(item.removeprefix(">")), censored=item.startswith(">"))
        for text in texts
        for item in text.split()
    ]


def _transferred(timeline: Timeline) -> int | None:
    total = 0
    for event in timeline.of("state_loaded"):
        if event.get("received_bytes") is None:
            return None
        total += event["received_bytes"]
    return total
