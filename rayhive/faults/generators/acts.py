"""Generator ``acts``: a list of faults, each with its kind, time and targets.

Targets are given by name (``peer-1``), by role (``leader``), or by words that a :class:`Selector`
turns into names (``minority but bootstrap``).
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rayhive.errors import Problem, nearest
from rayhive.faults.drawing import DrawnArgs, SeededRng, Span, When, drawn_args
from rayhive.faults.generators.base import COUNTS, Draft, Generator, Setting, heal_after_s
from rayhive.faults.kind import kind_of
from rayhive.spec import Model, SwarmConfig
from rayhive.spec.fault_plan import DYNAMIC_ROLES

#: Words that may stand alone.
WORDS = (*COUNTS, "preemptible", "bootstrap", "new", *DYNAMIC_ROLES)
ALLOWED = (
    f"one of {', '.join(WORDS)}, peer-N or node-N, or a list of them; "
    "a count can say more, as in 'one of preemptible' and 'minority but bootstrap'"
)

_NAME = re.compile(r"(peer|node)-(\d+)")
_COUNT = re.compile(
    rf"(?P<count>{'|'.join(COUNTS)})(?: of (?P<pool>preemptible))?"
    r"(?: but (?P<but>bootstrap|(?:peer|node)-\d+))?"
)


@dataclass(frozen=True)
class Selector:
    """Chooses targets among the peers of a swarm.

    Attributes:
        swarm: The swarm.
        key: Configuration key of the words, for problems.
        problems: Receives the problems.
        unit: ``peer`` or ``node``; node N is that of peer N.
    """

    swarm: SwarmConfig
    key: str
    problems: list[Problem]
    unit: str = "peer"

    def choose(self, words: Sequence[str], draw: SeededRng, joined: int = 0) -> tuple[str, ...]:
        """Return the names that the words select.

        Args:
            words: The words.
            draw: Random stream of the choices.
            joined: Number of peers that earlier faults of the plan start.

        Returns:
            Names in order, each once, or one role; empty if a problem was found.
        """
        if len(words) > 1 and any(word in DYNAMIC_ROLES for word in words):
            return self._refuse(list(words), "a role that stands alone")
        names: list[str] = []
        for word in words:
            if word == "new":
                names.append(f"peer-{self.swarm.peers + joined}")
                joined += 1
            else:
                names.extend(self._one(word, draw))
        if any(word in DYNAMIC_ROLES for word in words):
            return tuple(names)
        return tuple(sorted(set(names), key=lambda name: (name[:4], int(name[5:]))))

    def _one(self, word: str, draw: SeededRng) -> tuple[str, ...]:
        if word in DYNAMIC_ROLES:
            return (word,)
        name = _NAME.fullmatch(word)
        if name is not None:
            return (f"{name[1]}-{int(name[2])}",)
        if word == "bootstrap":
            return (f"{self.unit}-0",)
        if word == "preemptible":
            word = "all of preemptible"
        found = _COUNT.fullmatch(word)
        if found is None:
            return self._refuse(word, ALLOWED, nearest(word, WORDS))
        peers = self.swarm.peers
        pool = list(range(peers))
        if found["pool"]:
            classes = self.swarm.peer_classes[:peers]
            pool = [number for number, (_, item) in enumerate(classes) if item.preemptible]
        if not pool:
            return self._refuse(
                word, "given with preemptible swarm.node_classes; none is preemptible here"
            )
        count = COUNTS[found["count"]](len(pool))
        if found["but"]:
            excluded = int(found["but"].replace("bootstrap", "peer-0").rpartition("-")[2])
            pool = [number for number in pool if number != excluded]
        if not count:
            return self._refuse(word, f"given with more peers: of {peers} it selects none")
        if count > len(pool):
            return self._refuse(word, f"at most {len(pool)} of the {peers} peers")
        return tuple(f"{self.unit}-{number}" for number in draw.sample(pool, count))

    def _refuse(self, value: object, allowed: str, close: str | None = None) -> tuple[str, ...]:
        self.problems.append(Problem(self.key, value, allowed, close))
        return ()


def _words(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Act(Model):
    """One fault; some of its values may be drawn.

    Attributes:
        kind: A registered kind.
        who: Targets, in words that :class:`Selector` knows.
        at: Time of the injection.
        heal_after_s: Time to the heal [s]; for a kind with a notice, counted from its end.
        args: Parameters of the kind; a value may be ``{between: [a, b]}`` or ``{choose: [...]}``.
    """

    kind: str
    who: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_words)] = ("one",)
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
            unit = kind_of(act.kind).target_type
            selector = Selector(setting.swarm, f"{key}.who", setting.problems, unit)
            who = selector.choose(act.who, setting.draw(said, turn, "who"), joined)
            joined += act.who.count("new")
            if not who:
                continue
            args = drawn_args(act.args, functools.partial(setting.draw, said, turn, "args"))
            at = act.at.of(setting.draw(said, turn, "at"))
            draw = setting.draw(said, turn, "heal")
            heal = heal_after_s(act.kind, act.heal_after_s, args, draw)
            yield Draft(act.kind, who, at, heal, args, key)
