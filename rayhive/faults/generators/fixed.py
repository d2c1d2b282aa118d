"""A list of acts: this kind, to these, then."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import Field

from rayhive.faults.generators.base import (
    Draft,
    DrawnArgs,
    Generator,
    Setting,
    Span,
    When,
    Who,
    drawn_args,
    heal_of,
    unit_of,
)
from rayhive.faults.target_selector import Selector
from rayhive.spec import Model


class Act(Model):
    """One fault, with what is left to the seed.

    Attributes:
        kind: A registered kind.
        who: Whom it is for; see :mod:`rayhive.faults.target_selector`.
        at: When.
        heal_after_s: Time to the heal [s]; of a kind that gives a notice, from its end.
        args: Parameters of the kind; a value may be ``{between: [a, b]}`` or ``{choose: [...]}``.
    """

    kind: str
    who: Who = ("one",)
    at: When
    heal_after_s: Span | None = None
    args: DrawnArgs = Field(default_factory=dict)


class Acts(Generator):
    """Plans what it is told, one fault an act."""

    acts: tuple[Act, ...]

    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kinds of the acts with their parameters."""
        return [(act.kind, act.args) for act in self.acts]

    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield one fault an act.

        The choices of an act are drawn under what it says, its parameters aside, and not under
        its place in the list: neither another act nor another length of the notice changes them.
        """
        seen: Counter[str] = Counter()
        joined = 0
        for index, act in enumerate(self.acts):
            key = f"plan.acts.{index}"
            what = act.model_dump(mode="json", exclude={"args"}, exclude_defaults=True)
            said = json.dumps(what, sort_keys=True)
            turn = seen[said]
            seen[said] += 1
            selector = Selector(setting.swarm, f"{key}.who", setting.problems, unit_of(act.kind))
            who = selector.choose(act.who, setting.draw(said, turn, "who"), joined)
            joined += act.who.count("new")
            if not who:
                continue
            args = drawn_args(act.args, functools.partial(setting.draw, said, turn, "args"))
            yield Draft(
                kind=act.kind,
                who=who,
                at=act.at.of(setting.draw(said, turn, "at")),
                heal_after_s=heal_of(
                    act.kind, act.heal_after_s, args, setting.draw(said, turn, "heal")
                ),
                args=args,
                key=key,
            )
