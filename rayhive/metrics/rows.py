"""From a replicate's folder to its row in ``trials.parquet``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhive.columns import BY_NAME
from rayhive.errors import DamagedError
from rayhive.metrics import METRICS
from rayhive.metrics.group import Row
from rayhive.metrics.timeline import LOST, UNCOUNTED, Timeline, read_timelines
from rayhive.spec import Link, SwarmConfig

#: The scenario that every other one is compared with.
NO_FAULTS = "none"
#: A replicate stays what it is when its study gets more trials, or is gone on with other code.
_NOT_IDENTITY: dict[str, Any] = {
    "trial": True,
    "attempt": True,
    "folder": True,
    "directory": True,
    "git_revision": True,
    "timeouts": True,
    "budget": {"trials"},
}


@dataclass(frozen=True)
class Attempt:
    """One attempt at a replicate.

    Attributes:
        identity: The same for all attempts at a replicate, of whatever trial: a trial that is
            run again after the driver died may get a new number.
        rank: Of several attempts the one with the highest rank counts: the last that finished
            (one that was stopped has not), or else the last that was lost, or else the last.
        row: All its columns.
        twin: The identity of the replicate that it is compared with: the same with nothing broken.
            None if nothing was to be broken.
    """

    identity: str
    rank: tuple[int, int, float]
    row: Row
    twin: str | None = None


def replicate_row(folder: str | Path) -> Row:
    """Return the row of the replicate whose events are in ``folder``.

    Of several attempts in it, it is that of the last that finished.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    return last_attempt(folder).row


def last_attempt(folder: str | Path) -> Attempt:
    """Return the attempt that counts of those in a replicate's folder.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    return max(read_attempts(folder), key=lambda attempt: attempt.rank)


def read_attempts(folder: str | Path) -> Iterator[Attempt]:
    """Yield what a replicate's folder holds, usually one attempt.

    Raises:
        DamagedError: The events or the spec cannot be read; raised after what can be.
    """
    damage: DamagedError | None = None
    for timeline in read_timelines(folder):
        try:
            attempt = _attempt(timeline)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # An event lacks a field, or says what can't be: no number of such a log counts.
            reason = f"its events can't be measured: {error!r}"
            damage = damage or DamagedError(timeline.log or Path(folder), reason)
            damage.__cause__ = error
            continue
        yield attempt
    if damage is not None:
        raise damage


def _attempt(timeline: Timeline) -> Attempt:
    started = timeline.first("replicate_started")
    spec = timeline.spec.model_dump(mode="json", exclude=_NOT_IDENTITY)
    if timeline.spec.scenario == NO_FAULTS:
        spec["plan"] = None  # an empty plan is none
    return Attempt(
        identity=json.dumps(spec, sort_keys=True),
        rank=(
            0 if timeline.state in UNCOUNTED else 1 if timeline.state == LOST else 2,
            timeline.spec.attempt,
            started["t"] if started is not None else 0.0,
        ),
        row=timeline_row(timeline),
        twin=_twin(spec),
    )


def _twin(spec: dict[str, Any]) -> str | None:
    if spec["scenario"] == NO_FAULTS:
        return None
    return json.dumps({**spec, "scenario": NO_FAULTS, "plan": None}, sort_keys=True)


def timeline_row(timeline: Timeline) -> Row:
    """Return every column of one attempt: what it was, how it ended, and all metric groups."""
    row = {**_identity(timeline), **_configuration(timeline)}
    for name, group in METRICS.items():
        values = group().compute(timeline)
        if values.keys() != {*group.columns, *group.replicate_columns}:
            raise AssertionError(f"metric group {name!r} returned other columns than it declares")
        row.update(values)
    return row


def _identity(timeline: Timeline) -> Row:
    spec = timeline.spec
    return {
        "trial": spec.trial,
        "replicate": spec.replicate,
        "seed": spec.seed,
        "attempt": spec.attempt,
        "state": timeline.state,
        "stop_reason": timeline.stop_reason,
    }


def _configuration(timeline: Timeline) -> Row:
    spec = timeline.spec
    data = {event["data"] for event in timeline.of("peer_ready") if event.get("data")}
    return {
        "configuration": spec.configuration.label,
        "scenario": spec.scenario,
        "workload": spec.workload.label,
        "data": "; ".join(sorted(data)) or None,
        **{name: value for name, value in spec.configuration if name in BY_NAME},
        "peers": spec.swarm.peers,
        "link": _link(spec.swarm),
    }


def _link(swarm: SwarmConfig) -> str | None:
    """Describe the shaping of the links; None where nothing is shaped."""
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
