"""Generator ``acts``: a list of faults, each with kind, targets and time."""

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
    target_type_of,
)
from rayhive.faults.target_selector import Selector
from rayhive.spec import Model


class Act(Model):
    """One fault; some of its values may be drawn.

    Attributes:
        kind: A registered kind.
        who: Targets; see :mod:`rayhive.faults.target_selector`.
        at: Time of the injection.
        heal_after_s: Time to the heal [s]; for a kind with a notice, counted from its end.
        args: Parameters of the kind; a value may be ``{between: [a, b]}`` or ``{choose: [...]}``.
    """

    kind: str
    who: Who = ("one",)
    at: When
    heal_after_s: Span | None = None
    args: DrawnArgs = Field(default_factory=dict)


class Acts(Generator):
    """Plans one fault for each act."""

    acts: tuple[Act, ...]

    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kinds of the acts with their parameters."""
        return [(act.kind, act.args) for act in self.acts]

    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield one fault for each act.

        The random stream of an act is seeded with its content except the parameters, not with its
        index. Neither a further act nor another length of the notice changes its choices.
        """
        seen: Counter[str] = Counter()
        joined = 0
        for index, act in enumerate(self.acts):
            key = f"plan.acts.{index}"
            what = act.model_dump(mode="json", exclude={"args"}, exclude_defaults=True)
            said = json.dumps(what, sort_keys=True)
            turn = seen[said]
            seen[said] += 1
            selector = Selector(
                setting.swarm, f"{key}.who", setting.problems, target_type_of(act.kind)
            )
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
