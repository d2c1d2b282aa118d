"""What plans have to know of a kind beyond its contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayhive.registry import FAULTS

#: The kind that brings a peer of its own.
JOIN = "join"


def takes_away(kind: str) -> bool:
    """Return whether a peer does not train under a kind; until the heal, where it has one."""
    return kind in FAULTS and FAULTS.get(kind).effect in ("gone", "stopped")


def needs_of(faults: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, frozenset[str]]:
    """Return what each kind needs of the machine, over all faults of it.

    Args:
        faults: Kinds with parameters, as a plan or a scenario gives them; an unknown kind needs
            nothing.

    Returns:
        Kind -> keys of :data:`rayhive.faults.target.CAPABILITIES`.
    """
    needs: dict[str, frozenset[str]] = {}
    for kind, args in faults:
        known = FAULTS.get(kind).needs_for(args) if kind in FAULTS else ()
        needs[kind] = needs.get(kind, frozenset()) | frozenset(known)
    return needs


def is_inside(kind: str) -> bool:
    """Return whether the peer does it itself, in a round of the training."""
    return kind in FAULTS and bool(FAULTS.get(kind).inside)


def gives_notice(kind: str) -> bool:
    """Return whether a kind tells peers of their end before."""
    return kind in FAULTS and "notice_s" in FAULTS.get(kind).Args.model_fields


def notice_of(kind: str, args: Mapping[str, Any]) -> float:
    """Return how long a peer is told of its end before [s]; 0 for kinds that tell nothing."""
    if "notice_s" in args:
        given = args["notice_s"]
        return float(given) if isinstance(given, (int, float)) else 0.0
    if not gives_notice(kind):
        return 0.0
    return float(FAULTS.get(kind).Args.model_fields["notice_s"].default)
