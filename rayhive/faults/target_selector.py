"""Selection of a fault's targets: from words like ``minority`` to names of peers and nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rayhive.errors import Problem, nearest
from rayhive.faults.rng import SeededRng
from rayhive.spec import SwarmConfig
from rayhive.spec.fault_plan import DYNAMIC_ROLES

#: Word -> number of targets among n peers. ``all`` leaves joiners only.
COUNTS: dict[str, Callable[[int], int]] = {
    "one": lambda n: min(1, n),
    "minority": lambda n: max(0, (n - 1) // 2),
    "half": lambda n: n // 2,
    "majority": lambda n: n // 2 + 1 if n else 0,
    "all": lambda n: n,
}
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


def preemptible(swarm: SwarmConfig) -> tuple[int, ...]:
    """Return the numbers of the peers whose node class is preemptible."""
    flags = [item.preemptible for _, item in swarm.peer_classes]
    return tuple(number for number, flag in enumerate(flags[: swarm.peers]) if flag)


class Selector:
    """Chooses targets among the peers of a swarm.

    Args:
        swarm: The swarm.
        key: Configuration key of the words, for problems.
        problems: Receives the problems.
        unit: ``peer`` or ``node``; node N is that of peer N.
    """

    def __init__(
        self, swarm: SwarmConfig, key: str, problems: list[Problem], unit: str = "peer"
    ) -> None:
        self._swarm = swarm
        self._key = key
        self._problems = problems
        self._unit = unit

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
        peers = range(self._swarm.peers)
        pool = preemptible(self._swarm) if found["pool"] else tuple(peers)
        if not pool:
            return self._refuse(
                word, "given with preemptible swarm.node_classes; none is preemptible here"
            )
        count = COUNTS[found["count"]](len(pool))
        if found["but"]:
            excluded = int(found["but"].replace("bootstrap", "peer-0").rpartition("-")[2])
            pool = tuple(number for number in pool if number != excluded)
        if not 0 < count <= len(pool):
            return self._refuse(
                word,
                f"given with more peers: of {self._swarm.peers} it selects none"
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
