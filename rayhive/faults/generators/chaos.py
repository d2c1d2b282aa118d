"""Generator ``chaos``: a seeded mix of faults on at most a minority of the peers at once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rayhive.errors import Problem
from rayhive.faults.drawing import DrawnArgs, SeededRng, Span, drawn_args
from rayhive.faults.generators.base import COUNTS, Draft, Generator, Setting, heal_after_s
from rayhive.faults.kind import kind_of
from rayhive.spec import Model
from rayhive.spec.fault_plan import QUIET_S, At


class Ingredient(Model):
    """One kind of the mix.

    Attributes:
        weight: Relative frequency among the kinds.
        size: Number of targets: ``one`` or a ``minority``.
        heal_after_s: Time to the heal [s]; for a kind with a notice, counted from its end.
        args: Parameters of the kind; a value may be ``{between: [a, b]}`` or ``{choose: [...]}``.
    """

    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    size: Literal["one", "minority"] = "one"
    heal_after_s: Span | None = None
    args: DrawnArgs = Field(default_factory=dict)


def _seconds(low: float, high: float) -> Any:
    return Field(default={"between": (low, high)}, validate_default=True)


class ChaosSettings(Model):
    """Settings of a mix of faults.

    Attributes:
        faults: Number of faults.
        kinds: Kinds to draw from.
        first_s: Time of the first fault [s].
        spacing_s: Time from one fault to the next [s]; longer if peers have to come back first.
        settle_s: Time for which a peer counts as down after its heal, until it has rejoined [s].
        rounds: Rounds of the in-training faults.
        overlap: Whether a fault of another kind may target a peer while a first one lasts. Faults
            that remove the peer never overlap with others.
        available_only: Leave out kinds that the target does not allow; the plan then depends on
            the target.
    """

    faults: int = Field(ge=1, le=10_000)
    kinds: dict[str, Ingredient] = Field(min_length=1)
    first_s: Span = _seconds(8, 8)
    spacing_s: Span = _seconds(4, 8)
    settle_s: float = Field(default=5.0, ge=0)
    rounds: Span = _seconds(10, 100)
    overlap: bool = False
    available_only: bool = False


@dataclass(frozen=True)
class _Busy:
    """A peer that is under a fault of a kind until a time [s]."""

    number: int
    until: float
    kind: str

    def allows(self, kind: str) -> bool:
        """Return whether a fault of another kind may begin on the peer meanwhile."""
        away = any(kind_of(name).removes_peers() for name in (kind, self.kind))
        return not away and kind != self.kind


class Chaos(Generator):
    """Plans faults one after the other.

    At most a minority of the peers is under a fault, or within ``settle_s`` after one, at any time.
    The peer with in-training faults gets no others, as these faults are not in the spec of a
    replacement.
    """

    chaos: ChaosSettings

    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kinds of the mix with their parameters."""
        return [(kind, item.args) for kind, item in self.chaos.kinds.items()]

    @property
    def available_only(self) -> bool:
        """Whether kinds that the target does not allow are left out."""
        return self.chaos.available_only

    def at_most(self, peers: int) -> int | None:
        """Return a minority; it also holds if peers take longer to come back than planned."""
        return COUNTS["minority"](peers)

    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield the faults in order of time, in-training faults last."""
        chaos, peers = self.chaos, setting.swarm.peers
        if not self._possible(setting):
            return
        kinds = [k for k in chaos.kinds if not chaos.available_only or setting.allows(k)]
        weights = [chaos.kinds[kind].weight for kind in kinds]
        drawn = [
            kinds[setting.draw("chaos", index, "kind").weighted(weights)]
            for index in range(chaos.faults if kinds else 0)
        ]
        own = setting.draw("chaos", "insider").below(peers)
        inside = [kind for kind in drawn if kind_of(kind).in_training]
        outside = [kind for kind in drawn if not kind_of(kind).in_training]
        mixed = any(kind_of(kind).in_training for kind in kinds)
        pool = [number for number in range(peers) if number != own or not mixed]
        quiet_s = 0.0
        for draft in self._outside(setting, outside, pool):
            assert draft.at.seconds is not None
            quiet_s = draft.at.seconds + (draft.heal_after_s or 0.0) + QUIET_S
            yield draft
        if quiet_s > setting.budget.seconds_per_replicate:
            text = f"fewer, or with a budget.seconds_per_replicate of at least {quiet_s:.0f}: "
            text += f"the last {QUIET_S:g} s stay free of faults for the invariants about the end"
            self._refuse(setting, "faults", chaos.faults, text)
        yield from self._inside(setting, inside, own)

    def _possible(self, setting: Setting) -> bool:
        """Return whether the mix can be planned; record the problems otherwise."""
        known = len(setting.problems)
        peers = setting.swarm.peers
        if COUNTS["minority"](peers) == 0:
            self._refuse(setting, "faults", self.chaos.faults, "given with at least 3 peers")
        for name, item in self.chaos.kinds.items():
            kind = kind_of(name)
            if kind.joins:
                self._refuse(setting, f"kinds.{name}", name, "a kind without new peers")
            if (kind.removes_peers() or kind.heals) and item.heal_after_s is None:
                key = f"kinds.{name}.heal_after_s"
                self._refuse(setting, key, None, "given: no fault may last")
        if self.chaos.rounds.between[0] < 1:
            self._refuse(setting, "rounds", self.chaos.rounds.between, "rounds from 1 on")
        return len(setting.problems) == known

    def _inside(self, setting: Setting, kinds: list[str], peer: int) -> Iterator[Draft]:
        """Yield in-training faults of one peer, of which no two act in one round."""
        args = [self._args(setting, kind, f"inside {i}") for i, kind in enumerate(kinds)]
        more = [kind_of(kind).last_round(0, own) for kind, own in zip(kinds, args, strict=True)]
        low, high = (int(end) for end in self.chaos.rounds.between)
        # The first rounds, as if every fault acted in one.
        rounds = range(low, high + 1 - sum(more))
        if len(kinds) > len(rounds):
            allowed = f"at least {len(kinds) + sum(more)} rounds"
            self._refuse(setting, "rounds", [low, high], allowed)
            return
        chosen = setting.draw("chaos", "rounds").sample(rounds, len(kinds))
        for kind, own, first in zip(kinds, args, chosen, strict=True):
            before = sum(each for each, other in zip(more, chosen, strict=True) if other < first)
            at, key = At(round=first + before), f"plan.chaos.kinds.{kind}"
            yield Draft(kind, (f"peer-{peer}",), at, None, own, key)

    def _outside(self, setting: Setting, kinds: list[str], pool: list[int]) -> Iterator[Draft]:
        chaos = self.chaos
        most = COUNTS["minority"](setting.swarm.peers)
        busy: list[_Busy] = []

        def free(draw: SeededRng, t_s: float, size: int, kind: str) -> tuple[float, list[int]]:
            """Return the first time from ``t_s`` on with ``size`` free peers, and chosen ones."""
            while True:
                now = [item for item in busy if item.until > t_s]
                struck = {item.number for item in now}
                taken = {i.number for i in now if not (chaos.overlap and i.allows(kind))}
                left = [number for number in pool if number not in taken]
                # A peer under two faults is down once.
                chosen = draw.sample(left, size) if len(left) >= size else []
                if chosen and len(struck | set(chosen)) <= most:
                    return t_s, chosen
                t_s = min(item.until for item in now)

        t_s = chaos.first_s.seconds(setting.draw("chaos", "first"))
        for index, kind in enumerate(kinds):
            item = chaos.kinds[kind]
            if index:
                t_s += chaos.spacing_s.seconds(setting.draw("chaos", index, "spacing"))
            size = COUNTS[item.size](setting.swarm.peers)
            t_s, chosen = free(setting.draw("chaos", index, "who"), t_s, size, kind)
            args = self._args(setting, kind, index)
            draw = setting.draw("chaos", index, "heal")
            heal = heal_after_s(kind, item.heal_after_s, args, draw)
            until = t_s + (heal or 0.0) + chaos.settle_s
            busy += [_Busy(number, until, kind) for number in chosen]
            names = tuple(f"{kind_of(kind).target_type}-{number}" for number in chosen)
            at = At(seconds=round(t_s, 3))
            yield Draft(kind, names, at, heal, args, f"plan.chaos.kinds.{kind}")

    def _args(self, setting: Setting, kind: str, turn: object) -> dict[str, Any]:
        draw = functools.partial(setting.draw, "chaos", turn, "args")
        return drawn_args(self.chaos.kinds[kind].args, draw)

    def _refuse(self, setting: Setting, key: str, value: object, allowed: str) -> None:
        setting.problems.append(Problem(f"plan.chaos.{key}", value, allowed))
