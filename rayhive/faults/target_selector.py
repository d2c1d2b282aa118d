"""Whom a fault is for: from words like ``minority`` to the names of peers and nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rayhive.errors import Problem, nearest
from rayhive.faults.rng import SeededRng
from rayhive.spec import SwarmConfig
from rayhive.spec.fault_plan import DYNAMIC_ROLES

#: How many of so many peers. ``all`` are all that start together, so only joiners survive it.
COUNTS: dict[str, Callable[[int], int]] = {
    "one": lambda n: min(1, n),
    "minority": lambda n: max(0, (n - 1) // 2),
    "half": lambda n: n // 2,
    "majority": lambda n: n // 2 + 1 if n else 0,
    "all": lambda n: n,
}
#: Every word that stands alone.
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


def preemptible(swarm: SwarmConfig) -> tuple[int, ...]:
    """Return the numbers of the peers whose node class the cloud may take away."""
    flags = [item.preemptible for _, item in swarm.peer_classes]
    return tuple(number for number, flag in enumerate(flags[: swarm.peers]) if flag)


class Selector:
    """Chooses from the peers of a swarm.

    Args:
        swarm: The swarm.
        key: Where the words stand, for problems.
        problems: Gets what is wrong.
        unit: Whether it chooses ``peer`` or ``node``; node N is that of peer N.
    """

    def __init__(
        self, swarm: SwarmConfig, key: str, problems: list[Problem], unit: str = "peer"
    ) -> None:
        self._swarm = swarm
        self._key = key
        self._problems = problems
        self._unit = unit

    def choose(self, words: Sequence[str], draw: SeededRng, joined: int = 0) -> tuple[str, ...]:
        """Return the names that words stand for.

        Args:
            words: The words.
            draw: Makes the choices.
            joined: Peers that the plan has brought before.

        Returns:
            Names in order, each once, or one role; nothing if a problem was found.
        """
        if len(words) > 1 and any(word in DYNAMIC_ROLES for word in words):
            return self._refuse(list(words), "a role that stands alone")
        names: list[str] = []
        for word in words:
            if word == "new":
                names.append(f"peer-{self._swarm.peers + joined}")
                joined += 1
            else:
                names.extend(self._one(word, draw))
        if any(word in DYNAMIC_ROLES for word in words):
            return tuple(names)
        return tuple(sorted(set(names), key=_order))

    def _one(self, word: str, draw: SeededRng) -> tuple[str, ...]:
        if word in DYNAMIC_ROLES:
            return (word,)
        name = _NAME.fullmatch(word)
        if name is not None:
            return (f"{name[1]}-{int(name[2])}",)
        if word == "bootstrap":
            return (f"{self._unit}-0",)
        if word == "preemptible":
            word = "all of preemptible"
        found = _COUNT.fullmatch(word)
        if found is None:
            return self._refuse(word, ALLOWED, nearest(word, WORDS))
        everybody = range(self._swarm.peers)
        pool = preemptible(self._swarm) if found["pool"] else tuple(everybody)
        if not pool:
            return self._refuse(
                word, "given with a swarm.node_classes that are preemptible; here none is"
            )
        count = COUNTS[found["count"]](len(pool))
        if found["but"]:
            spared = int(found["but"].replace("bootstrap", "peer-0").rpartition("-")[2])
            pool = tuple(number for number in pool if number != spared)
        if not 0 < count <= len(pool):
            return self._refuse(
                word,
                f"given with more peers: of {self._swarm.peers} that is nobody"
                if not count
                else f"at most {len(pool)} of the {self._swarm.peers} peers",
            )
        return tuple(f"{self._unit}-{number}" for number in draw.sample(pool, count))

    def _refuse(self, value: object, allowed: str, close: str | None = None) -> tuple[str, ...]:
        self._problems.append(Problem(self._key, value, allowed, close))
        return ()


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("-")
    return kind, int(number)
