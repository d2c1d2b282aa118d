"""Outlier filter: rules by which a group refuses tensors before it averages.

Each member announces the norm of its tensors, the norm that is usual for it and, for the direction
rule, a sketch. All members judge by the same numbers and reach the same verdict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import TypeVar

import torch

from rayhive.averaging.tensor_summary import Sketcher, cosine, norm_of
from rayhive.spec import OutlierFilterRule

P = TypeVar("P", bound=Hashable)

#: Largest accepted ratio of a norm to the usual norm.
NORM_FACTOR = 100.0
#: Number of rounds whose norms determine the usual norm.
REMEMBERED = 16
#: Number of rounds over which the direction of a peer's tensors is averaged: the direction of a
#: single honest gradient is arbitrary.
LEANING = 16
#: Least mean cosine over these rounds under the direction rule.
LEAST_LEAN = -0.25


@dataclass(frozen=True)
class Announcement:
    """Summary of the tensors that a peer contributes to a round.

    Attributes:
        norm: Euclidean norm of all tensors together, by the steps that they sum up: a peer that has
            made more local steps than another has gone further. Not finite if any element is not.
        usual: Median of the peer's own norms in its last rounds, refused ones included; None
            before its first round.
        sketch: Sketch of the direction of the tensors; empty if the norm is not finite or 0,
            and under rules without directions.
        lean: Mean cosine between its tensors and those of the other peers in its last rounds; None
            before :data:`LEANING` rounds of three peers or more.
    """

    norm: float
    usual: float | None = None
    sketch: bytes = b""
    lean: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Reason why a peer's tensors do not enter an average.

    Attributes:
        reason: ``not_finite``, ``norm`` or ``direction``.
        norm: Their norm, as announced; None if only a part was checked.
        bound: The largest norm that would have been accepted, or the least lean; None if there is
            no such bound.
        lean: The lean that was too small, if that is the reason.
    """

    reason: str
    norm: float | None = None
    bound: float | None = None
    lean: float | None = None


def judge(said: Mapping[P, Announcement], rule: OutlierFilterRule = "norm") -> dict[P, Refusal]:
    """Return the refused peers and the reason for each.

    Deterministic: members with equal announcements reach equal verdicts. The rules are cumulative;
    each one refuses:

    * ``finite``: a norm that is not finite.
    * ``norm``: a norm of more than :data:`NORM_FACTOR` times the usual one, which is the larger
      of the peer's own and the group's (:func:`usual_norm`). Norms that grow together are
      accepted, and so are those of a peer whose norms have always been larger than the rest.
    * ``direction``: a mean cosine with the other peers below :data:`LEAST_LEAN`, in a minority of
      three peers or more. Honest peers with different data are refused as well.
    """
    refused = {
        p: Refusal("not_finite", a.norm) for p, a in said.items() if not math.isfinite(a.norm)
    }
    if rule == "finite":
        return refused
    usual = usual_norm([a for peer, a in said.items() if peer not in refused])
    for peer, told in said.items():
        bound = math.inf if usual is None else NORM_FACTOR * max(usual, _known(told.usual) or 0.0)
        if peer not in refused and told.norm > bound:
            refused[peer] = Refusal("norm", told.norm, bound)
    if rule == "norm":
        return refused
    leaning = {
        peer: Refusal("direction", a.norm, LEAST_LEAN, a.lean)
        for peer, a in said.items()
        if peer not in refused and a.lean is not None and a.lean < LEAST_LEAN
    }
    return refused | leaning if 2 * len(leaning) < len(said) - len(refused) else refused


def usual_norm(said: Collection[Announcement]) -> float | None:
    """Return the usual norm of a group; None if it is unknown.

    The larger of the median of the members' norms and of the median of their usual norms. Norms of
    0 (nothing to contribute) are left out. Of two norms the smaller one counts: with the larger
    one, no norm would ever be too large.
    """
    norms = [a.norm for a in said if a.norm > 0]
    memories = [usual for a in said if (usual := _known(a.usual)) is not None]
    found = [median_low(norms)] if len(norms) > 1 else []
    if memories:
        found.append(median_low(memories))
    return max(found, default=None)


def directions(said: Mapping[P, Announcement]) -> dict[P, float]:
    """Return the cosine between each peer's tensors and the sum of the rest, each of norm 1.

    Empty for fewer than three peers, as two are equally far from each other.
    """
    sketches = {
        peer: torch.frombuffer(bytearray(a.sketch), dtype=torch.float16).float()
        for peer, a in said.items()
        if a.sketch
    }
    if len(sketches) < 3:
        return {}
    total = torch.stack(list(sketches.values())).sum(0)
    return {peer: cosine(own, total - own) for peer, own in sketches.items()}


class OutlierFilter:
    """Filter of one peer: its rule, and its memory of its own rounds.

    The memory holds the peer's own norms, including those of refused tensors. A lasting change
    becomes the usual norm after half of :data:`REMEMBERED` rounds, so that no peer is refused for
    good. A peer without a memory, such as a joining one, starts with the usual norm of its group.

    Args:
        rule: See :func:`judge`; equal for all peers of a swarm.
        sketches: Whether the direction of the tensors is meaningful.
    """

    def __init__(self, rule: OutlierFilterRule = "norm", *, sketches: bool = True) -> None:
        self.rule = rule
        self._sketches = sketches and rule == "direction"
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._leans: deque[float] = deque(maxlen=LEANING)
        self._sketcher: Sketcher | None = None

    @torch.no_grad()
    def announce(self, tensors: Sequence[torch.Tensor], steps: int = 1) -> Announcement:
        """Return the peer's announcement of ``tensors``, which sum up that many steps."""
        whole = norm_of(tensors)
        norm = whole / steps
        usual = median_low(self._norms) if self._norms else None
        if not self._sketches or not math.isfinite(norm) or norm == 0:
            return Announcement(norm, usual)
        if self._sketcher is None:
            self._sketcher = Sketcher([tensor.numel() for tensor in tensors])
        direction = self._sketcher(tensors) / whole
        sketch = direction.to(torch.float16).numpy().tobytes()
        full = len(self._leans) == LEANING
        return Announcement(norm, usual, sketch, fmean(self._leans) if full else None)

    def judge(self, said: Mapping[P, Announcement]) -> dict[P, Refusal]:
        """Return the refused peers under this filter's rule; see :func:`judge`."""
        return judge(said, self.rule)

    def learn(self, said: Mapping[P, Announcement], own: P) -> None:
        """Remember a round of the group, whether or not this peer's tensors were refused.

        Args:
            said: Announcements of the members.
            own: This peer.
        """
        if own not in said:
            return
        if not self._norms:
            usual = usual_norm([a for a in said.values() if math.isfinite(a.norm)])
            self._norms.extend([usual] * REMEMBERED if usual is not None else ())
        if math.isfinite(said[own].norm) and said[own].norm > 0:
            self._norms.append(said[own].norm)
        cosines = directions(said)
        if own in cosines:
            self._leans.append(cosines[own])


def _known(usual: float | None) -> float | None:
    return usual if usual is not None and math.isfinite(usual) else None
