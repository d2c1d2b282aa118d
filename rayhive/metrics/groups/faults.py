"""Faults of a replicate: their number, the times until they were overcome, and their cost."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, starmap

from rayhive.columns import Column, Row, in_group
from rayhive.events import (
    FaultFired,
    FaultVerified,
    InvariantChecked,
    NodeNoticed,
    PeerFinished,
    RolledBack,
    Round,
    StateLoaded,
)
from rayhive.metrics.fault_impact import impacts, rejoins
from rayhive.metrics.folds import Percentile, Reduced, Total, pool_times, times_text
from rayhive.metrics.group import MetricGroup, total
from rayhive.metrics.stats import Time, known_percentile
from rayhive.timeline import Timeline

#: Time of a fault -> definition of its median.
_TIMES = {
    "detect": "Fault to first survivor's progress",
    "stall": "Longest time that a survivor went without a round",
    "recover": "Fault to 90 % of live-capacity throughput",
    "rejoin": "Peer start to its first accepted contribution",
}


def _percentiles(time: str, about: str) -> tuple[Column, Column]:
    """Return the two columns with percentiles of a time."""
    median, tail = Percentile(f"{time}_s", 50, interval=True), Percentile(f"{time}_s", 95)
    return (
        Column(f"{time}_p50_s", about, "s", fold=median),
        Column(f"{time}_p95_s", "95th percentile of the same", "s", fold=tail),
    )


def _pool(time: str) -> Column:
    about = f"Times behind `{time}_p50_s` and `{time}_p95_s`"
    return Column(f"{time}_s", about, type="text", fold=Reduced(pool_times))


class Faults(MetricGroup):
    """Columns of the fault plan, and of real preemptions.

    Those of the plan are None if nothing was planned and nothing fired.

    * ``faults_planned``, ``faults_fired``, ``faults_verified``: faults in the plan, with a
      ``fault_fired`` event, and with a ``fault_verified`` event that is ok.
    * ``detect_p50_s``, ``detect_p95_s``, ``stall_p50_s``, ``stall_p95_s``, ``recover_p50_s``,
      ``recover_p95_s`` [s]: percentiles over all faults that fired; see
      :func:`rayhive.metrics.fault_impact.impacts`. A time that had not ended with the training is
      censored; a recovery without a baseline to compare with is left out. A percentile that
      depends on the length of a censored time is None
      (:func:`rayhive.metrics.stats.censored_percentile`).
    * ``rejoin_p50_s``, ``rejoin_p95_s`` [s]: the same over the peers that joined while other peers
      trained; see :func:`rayhive.metrics.fault_impact.rejoins`.
    * ``censored``: faults whose detection, recovery or requested rejoin was not seen before the
      end, and further peers that joined and never contributed.
    * ``samples_lost``: computed samples that were neither committed nor pending when training
      ended; see :func:`samples_lost`.
    * ``state_transfer_bytes`` [B]: downloads of state from other peers. None if a peer did not
      report the size of one.
    * ``invariants_violated``: ``invariant`` events that are not ok. None without such events.
    * ``preemptions``: nodes with a ``node_notice`` for which peers were told to leave: real
      preemptions, which are in no plan. None without such events.
    * ``detect_s``, ``stall_s``, ``recover_s``, ``rejoin_s``: the times [s] behind the percentiles,
      in the order of time, separated by spaces. ``>`` marks a censored time.
    """

    columns = (
        *in_group(
            "faults",
            total("faults_planned", "Faults in the plan"),
            total("faults_fired", "Faults that fired"),
            total("faults_verified", "Faults proved to have taken effect"),
            *chain.from_iterable(starmap(_percentiles, _TIMES.items())),
            total("censored", "Faults whose recovery was not seen"),
            total("samples_lost", "Samples computed and not committed", fold=Total(whole=True)),
            total(
                "state_transfer_bytes",
                "State that peers downloaded from other peers",
                "B",
                fold=Total(whole=True),
            ),
            total("invariants_violated", "Violated invariants"),
            total("preemptions", "Nodes whose peers left for a real preemption notice"),
        ),
        *map(_pool, _TIMES),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        checked = timeline.of(InvariantChecked)
        row: Row = dict.fromkeys(self.names("replicate"))
        if checked:
            row["invariants_violated"] = sum(not event.ok for event in checked)
        if real := {event.node for event in timeline.of(NodeNoticed) if event.lives}:
            row["preemptions"] = len(real)
        plan, fired = timeline.spec.plan, timeline.of(FaultFired)
        if not fired and not (plan and plan.faults):
            return row
        faults, joined = impacts(timeline), rejoins(timeline)
        known = [item for item in faults if item.recovery_known]
        unseen = {item.fault for item in faults if item.detect_s is None}
        unseen |= {item.fault for item in known if item.recover_s is None}
        unseen |= {item.cause or item.peer for item in joined if item.seconds is None}
        return {
            **row,
            "faults_planned": None if plan is None else len(plan.faults),
            "faults_fired": len({event.fault for event in fired}),
            "faults_verified": len({e.fault for e in timeline.of(FaultVerified) if e.ok}),
            **_times("detect", (_time(item.detect_s, item.observed_s) for item in faults)),
            **_times("stall", (item.stall for item in faults)),
            **_times("recover", (_time(item.recover_s, item.observed_s) for item in known)),
            **_times("rejoin", (_time(item.seconds, item.observed_s) for item in joined)),
            "censored": len(unseen),
            "samples_lost": samples_lost(timeline),
            "state_transfer_bytes": _transferred(timeline),
        }


def _times(name: str, found: Iterable[Time | None]) -> Row:
    """Return the columns of one time: all of its values, p50 and p95."""
    times = [time for time in found if time is not None]
    return {
        f"{name}_s": times_text(times),
        f"{name}_p50_s": known_percentile(times, 50),
        f"{name}_p95_s": known_percentile(times, 95),
    }


def _time(seconds: float | None, observed_s: float) -> Time:
    return Time(observed_s, censored=True) if seconds is None else Time(seconds)


def samples_lost(timeline: Timeline) -> int | None:
    """Return the lost samples of the swarm: computed less committed less pending.

    Samples that were pending when training ended are not lost, because a run is as long as its
    budget. A killed peer has no pending samples, and those that it computed after its last report
    are unknown; peers report at every transition, and in between with ``progress``. None if a peer
    that finished did not report its pending samples.
    """
    if timeline.span is None:
        return None
    left = dict(timeline.computed_by_peer)
    for event in timeline.of(Round):
        if timeline.applied(event):
            left[event.peer or ""] -= event.samples
    total = 0
    for name, samples in left.items():
        end = timeline.incarnations[name].end
        # a peer that left has reported its lost samples
        pending = end.pending if isinstance(end, PeerFinished) else None if end is None else 0
        if pending is None:
            return None
        total += max(0, samples - pending)
    return total


def _transferred(timeline: Timeline) -> int | None:
    sizes = [event.received_bytes for event in timeline.of(StateLoaded)]
    sizes += [event.received_bytes or 0 for event in timeline.of(RolledBack)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
