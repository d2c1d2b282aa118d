"""Look-up of fault kinds by name, for plans that may still name unknown kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayhive.faults.kind import FaultKind
from rayhive.registry import FAULTS


def kind_of(name: str) -> type[FaultKind] | None:
    """Return a registered kind, or None for an unknown name, which validation reports."""
    found: type[FaultKind] | None = FAULTS.get(name) if name in FAULTS else None
    return found


def needs_of(faults: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, frozenset[str]]:
    """Return the capabilities that each kind needs, over all of its faults.

    Args:
        faults: Kinds with parameters, as a plan or a scenario gives them. An unknown kind needs
            nothing.

    Returns:
        Kind -> keys of :data:`rayhive.faults.target.CAPABILITIES`.
    """
    needs: dict[str, frozenset[str]] = {}
    for name, args in faults:
        kind = kind_of(name)
        known = () if kind is None else kind.needs_for(args)
        needs[name] = needs.get(name, frozenset()) | frozenset(known)
    return needs


def removes_peers(name: str) -> bool:
    """Return whether the targets of a kind do not train while it lasts."""
    kind = kind_of(name)
    return kind is not None and kind.removes_peers()


def is_in_training(name: str) -> bool:
    """Return whether the peer's training process executes a kind itself."""
    kind = kind_of(name)
    return kind is not None and kind.in_training


def is_join(name: str) -> bool:
    """Return whether a kind starts peers that are new to the swarm."""
    kind = kind_of(name)
    return kind is not None and kind.joins
