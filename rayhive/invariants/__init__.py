"""Invariants of every replicate under any faults, one file each, checked on the events alone."""

from __future__ import annotations

from collections.abc import Sequence

from rayhive.events import Event, InvariantChecked
from rayhive.invariants.base import Invariant
from rayhive.registry import INVARIANTS
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import Timeline

_HERE = "rayhive.invariants"

INVARIANTS.register_lazy("log_complete", f"{_HERE}.log_complete:LogComplete")
INVARIANTS.register_lazy("one_component", f"{_HERE}.one_component:OneComponent")
INVARIANTS.register_lazy("parameters_finite", f"{_HERE}.parameters_finite:ParametersFinite")
INVARIANTS.register_lazy(
    "replacement_contributes", f"{_HERE}.replacement_contributes:ReplacementContributes"
)
INVARIANTS.register_lazy("replicas_agree", f"{_HERE}.replicas_agree:ReplicasAgree")
INVARIANTS.register_lazy("rounds_monotone", f"{_HERE}.rounds_monotone:RoundsMonotone")
INVARIANTS.register_lazy("samples_conserved", f"{_HERE}.samples_conserved:SamplesConserved")
INVARIANTS.register_lazy("survivors_progress", f"{_HERE}.survivors_progress:SurvivorsProgress")


def check_all(spec: ReplicateSpec, events: Sequence[Event]) -> list[InvariantChecked]:
    """Check every invariant of one replicate.

    Args:
        spec: The replicate.
        events: Its events in the order of writing, at least up to the last peer's end.

    Returns:
        One event for each invariant, sorted by name.
    """
    log, found = Timeline(spec, events), []
    for name, kind in INVARIANTS.items():
        invariant: Invariant = kind()
        wrong = invariant.check(log)
        ok, checked = not wrong, invariant.checked
        found.append(InvariantChecked(name=name, ok=ok, checked=checked, violations=wrong))
    return found
