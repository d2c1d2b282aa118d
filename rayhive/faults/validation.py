"""What is wrong with a plan before it runs: unknown kinds, late faults, nobody left alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from rayhive.errors import Problem, unknown
from rayhive.faults.generators.base import Draft
from rayhive.faults.queries import JOIN, is_inside, takes_away
from rayhive.registry import FAULTS
from rayhive.spec import Budget, SwarmConfig, as_problem
from rayhive.spec.fault_plan import DYNAMIC_ROLES, At

#: Times are rounded to thousandths before they are added up [s].
_ROUNDING_S = 1e-6


def completed_args(draft: Draft, problems: list[Problem]) -> dict[str, Any]:
    """Return the parameters of a fault with the defaults of its kind, as JSON knows them."""
    if draft.kind not in FAULTS:
        return dict(draft.args)
    model = FAULTS.get(draft.kind).Args
    try:
        return dict(model.model_validate(draft.args).model_dump(mode="json"))
    except ValidationError as error:
        for item in error.errors():
            told = as_problem(item, model)
            key = f"{draft.key}.args.{told.key}".rstrip(".")
            problems.append(Problem(key, told.value, told.allowed, told.nearest))
        return dict(draft.args)


def check_drafts(drafts: Sequence[Draft], swarm: SwarmConfig, budget: Budget) -> Iterator[Problem]:
    """Find what is wrong with the faults of a plan.

    Args:
        drafts: The faults.
        swarm: The swarm, with as many peers as start together.
        budget: When a replicate ends.
    """
    for kind, key in {draft.kind: draft.key for draft in reversed(drafts)}.items():
        if kind not in FAULTS:
            yield unknown(f"{key}.kind", kind, FAULTS.names())
    for draft in drafts:
        if draft.kind in FAULTS:
            yield from _check_kind(draft, swarm)
        yield from _check_budget(draft, swarm, budget)
    yield from _check_names(drafts, swarm.peers)
    yield from _check_inside(drafts)
    yield from _check_present(drafts)
    yield from _check_survivors(drafts, swarm.peers)


def _check_kind(draft: Draft, swarm: SwarmConfig) -> Iterator[Problem]:
    kind = FAULTS.get(draft.kind)
    if draft.heal_after_s is not None and not kind.heals:
        yield Problem(
            f"{draft.key}.heal_after_s", draft.heal_after_s, f"absent: {draft.kind} does not heal"
        )
    if kind.inside and draft.at.round is None:
        yield Problem(
            f"{draft.key}.at", str(draft.at), f"a round: {draft.kind} happens in the training"
        )
    if kind.inside and swarm.use_local_updates:
        yield Problem(
            f"{draft.key}.kind",
            draft.kind,
            "a kind that peers do not commit themselves: with swarm.use_local_updates gradients "
            "are not averaged",
        )
    strangers = [name for name in draft.who if not name.startswith("peer-")]
    if kind.inside and strangers:
        yield Problem(
            f"{draft.key}.who",
            strangers[0],
            f"a peer that is known before training starts: it does the {draft.kind} itself",
        )


def _check_budget(draft: Draft, swarm: SwarmConfig, budget: Budget) -> Iterator[Problem]:
    seconds, end_s = draft.at.seconds, budget.seconds_per_replicate
    if seconds is not None:
        last = seconds + (draft.heal_after_s or 0.0)
        if last >= end_s:
            what = "ends" if last > seconds else "fires"
            yield Problem(
                f"{draft.key}.at",
                str(draft.at),
                f"sooner, or with a longer budget.seconds_per_replicate: {draft.kind} {what} at "
                f"{last:g} s of {end_s:g} s",
            )
    elif draft.heal_after_s is not None and draft.heal_after_s >= end_s:
        yield Problem(f"{draft.key}.heal_after_s", draft.heal_after_s, f"less than {end_s:g} s")
    if draft.at.round is not None and budget.samples_per_replicate is not None:
        rounds = -(-budget.samples_per_replicate // swarm.target_batch_size)
        last_round = draft.at.round + _further_rounds(draft)
        if last_round >= rounds:
            yield Problem(
                f"{draft.key}.at",
                str(draft.at),
                f"a round before the last, {rounds}, or with a larger budget.samples_per_replicate",
            )


def _further_rounds(draft: Draft) -> int:
    """Return in how many rounds after the planned one a fault happens, too."""
    if draft.kind not in FAULTS or not FAULTS.get(draft.kind).inside:
        return 0
    field = FAULTS.get(draft.kind).Args.model_fields.get("rounds")
    rounds = draft.args.get("rounds", 1 if field is None else field.default)
    return rounds - 1 if isinstance(rounds, int) else 0  # what is no number is told elsewhere


def _check_names(drafts: Sequence[Draft], peers: int) -> Iterator[Problem]:
    """Find names of peers and nodes that never are, or are twice."""
    joins: list[int] = []
    for draft in drafts:
        if draft.kind == JOIN:
            for name in draft.who:
                number = _number(name)
                if number is None or number < peers:
                    yield Problem(f"{draft.key}.who", name, f"a new peer: peer-{peers} and on")
                elif number in joins:
                    yield Problem(f"{draft.key}.who", name, "a peer that joins once")
                else:
                    joins.append(number)
    missing = sorted(set(range(peers, max(joins, default=0))) - set(joins))
    if missing:
        yield Problem("plan", f"peer-{missing[0]}", "a peer that joins: numbers have no gaps")
    for draft in drafts:
        for name in draft.who if draft.kind != JOIN else ():
            number = _number(name)
            if number is not None and number >= peers and number not in joins:
                allowed = f"one of the {peers} peers, or one that joins before"
                yield Problem(f"{draft.key}.who", name, allowed)


def _check_inside(drafts: Sequence[Draft]) -> Iterator[Problem]:
    """Find faults that a peer should do itself when it is no longer the one that was told."""
    for draft in drafts:
        if not is_inside(draft.kind):
            continue
        for other in drafts:
            shared = _numbers(draft.who) & _numbers(other.who)
            if takes_away(other.kind) and shared and not _is_later(other.at, draft.at):
                yield Problem(
                    f"{draft.key}.who",
                    f"peer-{min(shared)}",
                    f"a peer that {other.kind} ({other.at}) does not take: its replacement is "
                    f"not told of {draft.kind}",
                )
                break


def _check_present(drafts: Sequence[Draft]) -> Iterator[Problem]:
    """Find faults on somebody whom another fault has taken away by then, as far as is known."""
    for index, draft in enumerate(drafts):
        for before, other in enumerate(drafts):
            first = other.at != draft.at or before < index
            shared = _numbers(draft.who) & _numbers(other.who)
            if takes_away(other.kind) and before != index and first and shared:
                known = other.at.seconds is not None or other.heal_after_s is None
                if (known or other.at == draft.at) and _is_down(other, draft.at):
                    yield Problem(
                        f"{draft.key}.who",
                        f"peer-{min(shared)}",
                        f"somebody who is there at {draft.at}: {other.kind} took them at "
                        f"{other.at}",
                    )
                    break


def _is_later(one: At, other: At) -> bool:
    return one.round is not None and other.round is not None and one.round > other.round


def _check_survivors(drafts: Sequence[Draft], peers: int) -> Iterator[Problem]:
    """Find the first moment at which nobody is left.

    Rounds and seconds are two clocks, and how they go together is not known before: faults of one
    clock are counted against each other, those that never heal against all in the end. A fault
    that is addressed by round counts as healed in the next round that has one.
    """
    away = [draft for draft in drafts if takes_away(draft.kind)]
    joins = [draft for draft in drafts if draft.kind == JOIN]
    for moment in sorted(
        {draft.at for draft in away}, key=lambda at: (at.seconds or 0.0, at.round or 0)
    ):
        here = peers + sum(len(join.who) for join in joins if _reached(join.at, moment))
        gone = [draft for draft in away if _is_down(draft, moment)]
        if _count(gone) >= here:
            yield _nobody(gone[-1], f"at {moment}")
            return
    ends = [draft for draft in away if draft.heal_after_s is None]
    if ends and _count(ends) >= peers + sum(len(join.who) for join in joins):
        yield _nobody(ends[-1], "in the end")


def _nobody(draft: Draft, when: str) -> Problem:
    return Problem(f"{draft.key}.who", list(draft.who), f"fewer: nobody would be left {when}")


def _reached(at: At, moment: At) -> bool:
    """Say whether ``at`` has come by ``moment``; of another clock, that is not known."""
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
    """Count those who are down; of a role it is known that it is somebody who was up."""
    names = {name for draft in drafts for name in draft.who if name not in DYNAMIC_ROLES}
    return len(_numbers(names)) + sum(draft.who[0] in DYNAMIC_ROLES for draft in drafts)


def _numbers(names: Iterable[str]) -> set[int]:
    return {number for name in names if (number := _number(name)) is not None}


def _number(name: str) -> int | None:
    """Return the number of a peer or node: node N is taken for that of peer N."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else None
