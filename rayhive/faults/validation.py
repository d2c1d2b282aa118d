"""Validation of a plan before it runs: unknown kinds, late faults, absent targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from rayhive.errors import Problem, unknown
from rayhive.faults.generators.base import Draft
from rayhive.faults.in_training import changes_gradients
from rayhive.faults.kind import kind_of
from rayhive.registry import FAULTS
from rayhive.spec import Budget, SwarmConfig
from rayhive.spec.fault_plan import DYNAMIC_ROLES, At
from rayhive.spec.loading import as_problem

#: Tolerance for sums of times that are rounded to thousandths [s].
_ROUNDING_S = 1e-6


def completed_args(draft: Draft, problems: list[Problem]) -> dict[str, Any]:
    """Return the parameters of a fault with the defaults of its kind, as JSON values."""
    if draft.kind not in FAULTS:
        return dict(draft.args)
    args = kind_of(draft.kind).Args
    try:
        return args.model_validate(draft.args).model_dump(mode="json")
    except ValidationError as error:
        for item in error.errors():
            found = as_problem(item, args)
            key = f"{draft.key}.args.{found.key}".rstrip(".")
            problems.append(Problem(key, found.value, found.allowed, found.nearest))
        return dict(draft.args)


def check_drafts(drafts: Sequence[Draft], swarm: SwarmConfig, budget: Budget) -> Iterator[Problem]:
    """Yield the problems of a plan's faults.

    Args:
        drafts: The faults.
        swarm: The swarm; its ``peers`` start together.
        budget: Limits of a replicate.
    """
    for name, first in {draft.kind: draft for draft in reversed(drafts)}.items():
        if name not in FAULTS:
            yield unknown(f"{first.key}.kind", name, FAULTS.names())
    for draft in drafts:
        if draft.kind in FAULTS:
            yield from _check_kind(draft, swarm)
        yield from _check_budget(draft, swarm, budget)
    yield from _check_names(drafts, swarm.peers)
    yield from _check_in_training(drafts)
    yield from _check_present(drafts)
    yield from _check_survivors(drafts, swarm.peers)


def _check_kind(draft: Draft, swarm: SwarmConfig) -> Iterator[Problem]:
    kind = kind_of(draft.kind)
    if draft.heal_after_s is not None and not kind.heals:
        allowed = f"absent: {draft.kind} does not heal"
        yield draft.problem("heal_after_s", draft.heal_after_s, allowed)
    if not kind.in_training:
        return
    if draft.at.round is None:
        yield draft.problem("at", str(draft.at), f"a round: {draft.kind} happens in the training")
    unknown_peers = [name for name in draft.who if not name.startswith("peer-")]
    if unknown_peers:
        allowed = f"a peer (peer-N): {draft.kind} is in the peer's spec before training starts"
        yield draft.problem("who", unknown_peers[0], allowed)


def _check_budget(draft: Draft, swarm: SwarmConfig, budget: Budget) -> Iterator[Problem]:
    seconds, end_s = draft.at.seconds, budget.seconds_per_replicate
    if seconds is not None:
        last = seconds + (draft.heal_after_s or 0.0)
        if last >= end_s:
            allowed = "sooner, or with a longer budget.seconds_per_replicate: "
            allowed += f"{draft.kind} {'ends' if last > seconds else 'fires'} at "
            yield draft.problem("at", str(draft.at), f"{allowed}{last:g} s of {end_s:g} s")
    elif draft.heal_after_s is not None and draft.heal_after_s >= end_s:
        yield draft.problem("heal_after_s", draft.heal_after_s, f"less than {end_s:g} s")
    if draft.at.round is not None and budget.samples_per_replicate is not None:
        rounds = -(-budget.samples_per_replicate // swarm.target_batch_size)
        if kind_of(draft.kind).last_round(draft.at.round, draft.args) >= rounds:
            allowed = f"a round before the last, {rounds}, or with a larger "
            yield draft.problem("at", str(draft.at), allowed + "budget.samples_per_replicate")


def _check_names(drafts: Sequence[Draft], peers: int) -> Iterator[Problem]:
    """Yield names of peers and nodes that do not exist in the run, and repeated joiners."""
    joins: list[int] = []
    for draft in drafts:
        for name in draft.who if kind_of(draft.kind).joins else ():
            number = _number(name)
            if number is None or number < peers:
                yield draft.problem("who", name, f"a new peer: peer-{peers} and on")
            elif number in joins:
                yield draft.problem("who", name, "a peer that joins once")
            else:
                joins.append(number)
    missing = sorted(set(range(peers, max(joins, default=0))) - set(joins))
    if missing:
        yield Problem("plan", f"peer-{missing[0]}", "a peer that joins: numbers have no gaps")
    for draft in drafts:
        for name in () if kind_of(draft.kind).joins else draft.who:
            number = _number(name)
            if number is not None and number >= peers and number not in joins:
                allowed = f"one of the {peers} peers, or one that joins before"
                yield draft.problem("who", name, allowed)


def _check_in_training(drafts: Sequence[Draft]) -> Iterator[Problem]:
    """Yield in-training faults that would not happen, or not as planned.

    Replacements of peers do not get them. Two faults of one gradient would be one fault of another
    kind, or none.
    """
    for index, draft in enumerate(drafts):
        for other in drafts[:index]:
            both = set(draft.who) & set(other.who)
            if both and _same_gradients(draft, other):
                allowed = f"a peer whose gradients {other.kind} ({other.at}) does not change then"
                yield draft.problem("who", min(both), allowed)
    for draft in drafts:
        for _, other, peer in _removals(drafts, draft) if kind_of(draft.kind).in_training else ():
            if other.at == draft.at or not _reached(draft.at, other.at):
                allowed = f"a peer that {other.kind} ({other.at}) does not remove: {draft.kind} is "
                allowed += "not in the spec of a replacement"
                yield draft.problem("who", peer, allowed)
                break


def _same_gradients(one: Draft, other: Draft) -> bool:
    """Return whether two faults act in one round and both change gradients."""
    spans = []
    for draft in (one, other):
        kind, first = kind_of(draft.kind), draft.at.round
        if first is None or not changes_gradients(kind):
            return False
        spans.append((first, kind.last_round(first, draft.args)))
    return max(spans)[0] <= min(last for _, last in spans)


def _check_present(drafts: Sequence[Draft]) -> Iterator[Problem]:
    """Yield faults on peers that another fault has removed by then, as far as the plan can tell."""
    for index, draft in enumerate(drafts):
        for before, other, peer in _removals(drafts, draft):
            first = other.at != draft.at or before < index
            known = other.at == draft.at or other.at.seconds is not None
            known = known or other.heal_after_s is None
            if first and known and _is_down(other, draft.at):
                allowed = f"a peer that is present at {draft.at}: {other.kind} removed it at "
                yield draft.problem("who", peer, f"{allowed}{other.at}")
                break


def _removals(drafts: Sequence[Draft], draft: Draft) -> Iterator[tuple[int, Draft, str]]:
    """Yield the faults that remove targets of a fault: index, fault, name of the first target."""
    for index, other in enumerate(drafts):
        shared = _numbers(draft.who) & _numbers(other.who)
        if shared and kind_of(other.kind).removes_peers():
            yield index, other, f"peer-{min(shared)}"


def _check_survivors(drafts: Sequence[Draft], peers: int) -> Iterator[Problem]:
    """Yield the first fault after which no peer is left.

    The order of a round and a time is unknown before the run. Faults addressed by round are
    therefore counted against each other, as are faults addressed by time; faults that never heal
    are counted against all faults at the end. A fault addressed by round counts as healed in the
    next round with a fault.
    """
    away = [draft for draft in drafts if kind_of(draft.kind).removes_peers()]
    joins = [draft for draft in drafts if kind_of(draft.kind).joins]
    for moment in sorted(
        {draft.at for draft in away}, key=lambda at: (at.seconds or 0.0, at.round or 0)
    ):
        present = peers + sum(len(join.who) for join in joins if _reached(join.at, moment))
        gone = [draft for draft in away if _is_down(draft, moment)]
        if _count(gone) >= present:
            yield _none_left(gone[-1], f"at {moment}")
            return
    ends = [draft for draft in away if draft.heal_after_s is None]
    if ends and _count(ends) >= peers + sum(len(join.who) for join in joins):
        yield _none_left(ends[-1], "in the end")


def _none_left(draft: Draft, when: str) -> Problem:
    return draft.problem("who", list(draft.who), f"fewer: no peer would be left {when}")


def _reached(at: At, moment: At) -> bool:
    """Return whether ``at`` has come by ``moment``; False if one is a round and one a time."""
    if at.seconds is not None and moment.seconds is not None:
        return at.seconds <= moment.seconds
    if at.round is not None and moment.round is not None:
        return at.round <= moment.round
    return False


def _is_down(draft: Draft, moment: At) -> bool:
    if not _reached(draft.at, moment):
        return False
    if draft.heal_after_s is None:
        return True
    if moment.seconds is not None and draft.at.seconds is not None:
        return moment.seconds < draft.at.seconds + draft.heal_after_s - _ROUNDING_S
    return draft.at == moment


def _count(drafts: Iterable[Draft]) -> int:
    """Return the number of peers that are down; each role is one peer that was up before."""
    names = {name for draft in drafts for name in draft.who if name not in DYNAMIC_ROLES}
    return len(_numbers(names)) + sum(draft.who[0] in DYNAMIC_ROLES for draft in drafts)


def _numbers(names: Iterable[str]) -> set[int]:
    return {number for name in names if (number := _number(name)) is not None}


def _number(name: str) -> int | None:
    """Return the number of a peer or node; node N counts as that of peer N."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else None
