"""Invariants of every replicate under any faults, one file each, checked on the events alone."""

from __future__ import annotations

from collections.abc import Sequence

from rayhive.events import Event, InvariantChecked
from rayhive.invariants.base import Invariant
from rayhive.registry import INVARIANTS
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import Timeline

INVARIANTS.register_files("rayhive.invariants")


def check_all(spec: ReplicateSpec, events: Sequence[Event]) -> list[InvariantChecked]:
    """Check every invariant of one replicate; of a baseline, those that are not of a swarm.

    Args:
        spec: The replicate.
        events: Its events in the order of writing, at least up to the last peer's end.

    Returns:
        One event for each invariant, sorted by name.
    """
    log, found = Timeline(spec, events), []
    for name, kind in INVARIANTS.items():
        invariant: Invariant = kind()
        if invariant.of_swarm and spec.baseline is not None:
            continue
        wrong = invariant.check(log)
        ok, checked = not wrong, invariant.checked
        found.append(InvariantChecked(name=name, ok=ok, checked=checked, violations=wrong))
    return found
