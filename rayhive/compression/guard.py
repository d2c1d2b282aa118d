"""Corrupt tensors are refused before they reach another peer, and their sender is named.

Before a group averages, each member announces what it is about to send: the norm, a sketch, and
the norm that it is used to. It travels with what the group gathers anyway, so all members judge
by the same numbers and come to the same verdict without another message. Who is refused knows it
like everybody else: it contributes nothing, with weight 0, and takes the average of the others.

This is for peers that are broken, not for liars. Against these a reducer looks at every part once
more (:mod:`rayhive.compression.reducer`), and nobody hands on an average that is not finite.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean, median, median_low
from typing import Any, TypeVar

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, MSGPackSerializer
from hivemind.utils.asyncio import enter_asynchronously

from rayhive.compression.matchmaking import TRACE, StepTrace
from rayhive.compression.powersgd import STEP
from rayhive.compression.rendezvous import NobodyElse
from rayhive.compression.rounds import RoundResult
from rayhive.compression.sketching import Sketcher, cosine

P = TypeVar("P", bound=Hashable)

#: How many times as large as is usual in its group a tensor may be.
NORM_FACTOR = 50.0
#: Rounds whose norms say what is usual.
REMEMBERED = 16
#: From so many elements on, tensors are looked at in a thread and not in the event loop.
LARGE = 1_000_000
#: Rounds over which the direction of a peer's tensors is looked at: that of a single honest
#: gradient may be anything.
LEANING = 16
#: Least mean cosine over these rounds: who is below it climbs where the others descend.
LEAST_LEAN = -0.25
#: What who did nothing without the others counts for; not 0, should all have done nothing.
LEAST_ROUNDS = 1e-6
#: Weight of tensors that must not count; not 0, should all of a group have it.
STALE_WEIGHT = 1e-9
_KEY = "guard"


class AverageNotFinite(Exception):
    """A round came out with an average that is not finite, though nothing that went in was."""


@dataclass(frozen=True)
class Announcement:
    """What a peer says of what it is about to send.

    Attributes:
        norm: Euclidean norm of all tensors together; not finite if any element is not.
        usual: The norm that it is used to; None before its first round.
        sketch: Sketch of the tensors, in units of the norm; empty if that is not finite or 0.
        lean: Mean cosine between its tensors and those of the others in its last rounds; None
            before it was in :data:`LEANING` rounds of three peers or more.
    """

    norm: float
    usual: float | None = None
    sketch: bytes = b""
    lean: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a peer's tensors do not enter an average.

    Attributes:
        reason: ``not_finite``, ``norm`` or ``direction``.
        norm: Their norm; None if only a part was seen.
        bound: The largest norm that would have been accepted, or the least lean; None if nothing
            would have been.
        lean: The lean that was too small, if that is the reason.
    """

    reason: str
    norm: float | None = None
    bound: float | None = None
    lean: float | None = None


def judge(said: Mapping[P, Announcement]) -> dict[P, Refusal]:
    """Return who is refused, and why; the same for everybody who has heard the same.

    A norm is too large if it is :data:`NORM_FACTOR` times the usual one, which is the larger of
    the group's median and of what its members are used to: where all grow, nobody is refused,
    and a group of two, which has no majority, has its memory. Peers that have nothing to
    contribute (norm 0) say nothing of the others. A direction is refused only of a minority:
    where half a group leans the other way, nobody can tell which half is wrong.
    """
    refused = {
        p: Refusal("not_finite", a.norm) for p, a in said.items() if not math.isfinite(a.norm)
    }
    sizes = [a.norm for p, a in said.items() if p not in refused and a.norm > 0]
    memories = [a.usual for a in said.values() if a.usual is not None and math.isfinite(a.usual)]
    usual = [median_low(sizes)] if len(sizes) > 1 else []
    if memories:
        usual.append(median(memories))
    bound = NORM_FACTOR * max(usual) if usual else math.inf
    for peer, announcement in said.items():
        if peer not in refused and announcement.norm > bound:
            refused[peer] = Refusal("norm", announcement.norm, bound)
    leaning = {
        peer: Refusal("direction", a.norm, LEAST_LEAN, a.lean)
        for peer, a in said.items()
        if peer not in refused and a.lean is not None and a.lean < LEAST_LEAN
    }
    return refused | leaning if 2 * len(leaning) < len(said) - len(refused) else refused


def directions(said: Mapping[P, Announcement]) -> dict[P, float]:
    """Return the cosine between each peer's tensors and the sum of the others', each of norm 1.

    Of two peers, each is as far from the other: then there are none.
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


def weights(told: Mapping[P, tuple[tuple[str, ...], int | None]]) -> dict[P, float]:
    """Return by how much each peer's parameters count, the most by 1.

    Those who were together have the same parameters, so each of them counts for its share of the
    rounds that they did. Those who have lost nobody count like the average of those who have.

    Args:
        told: For each peer, who was with it while others were lost, and the rounds that it did.
    """
    rounds: dict[tuple[str, ...], int] = {}
    for half, apart in told.values():
        if apart is not None:
            rounds[half] = max(rounds.get(half, 0), apart)
    if not rounds:
        return dict.fromkeys(told, 1.0)
    sizes = Counter(half for half, apart in told.values() if apart is not None)
    shares = {half: max(done, LEAST_ROUNDS) / sizes[half] for half, done in rounds.items()}
    usual = fmean(shares[half] for half, apart in told.values() if apart is not None)
    found = {p: usual if apart is None else shares[half] for p, (half, apart) in told.items()}
    return {peer: share / max(found.values()) for peer, share in found.items()}


class Guarded(DecentralizedAverager):
    """Mixin that stands before :class:`rayhive.compression.averager.MeasuredAverager`.

    It acts in rounds that meet by :class:`rayhive.compression.rendezvous.Rendezvous`; a group
    whose members announce nothing averages as ever. ``rejected`` of the round's result says what
    was refused: a list of peers, reasons, norms and bounds.
    """

    #: Whether the way in which tensors point says something.
    sketches = True
    # These live in the averager's process.
    _usual: deque[float] | None = None
    _leans: deque[float] | None = None
    _sketcher: Sketcher | None = None
    _matchmaking: Any

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        self._matchmaking.announce = self._with_announcement
        with contextlib.suppress(AverageNotFinite):  # the trainer has it from the step
            await super()._step(step=step, future_for_init=future_for_init)

    async def _with_announcement(self, data_for_gather: bytes) -> bytes:
        """Return what a step gathers together with what this peer announces."""
        bandwidth, mode, gathered = self.serializer.loads(data_for_gather)
        tensors = floats(self._averaged_tensors)
        if sum(tensor.numel() for tensor in tensors) < LARGE:
            said = self._announcement(tensors)
        else:
            loop = asyncio.get_running_loop()
            said = await loop.run_in_executor(None, self._announcement, tensors)
        return bytes(self.serializer.dumps([bandwidth, mode, _attached(gathered, said)]))

    @torch.no_grad()
    def _announcement(self, tensors: Sequence[torch.Tensor]) -> Announcement:
        norm = norm_of(tensors)
        usual = float(median(self._usual)) if self._usual else None
        if not self.sketches or not math.isfinite(norm) or norm == 0:
            return Announcement(norm, usual)
        if self._sketcher is None:
            self._sketcher = Sketcher([tensor.numel() for tensor in tensors])
        direction = self._sketcher(tensors) / norm
        sketch = direction.to(torch.float16).numpy().tobytes()
        full = self._leans is not None and len(self._leans) == LEANING
        return Announcement(norm, usual, sketch, fmean(self._leans or ()) if full else None)

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> RoundResult:
        """Average with those whose tensors can be right.

        Raises:
            NobodyElse: There is nobody in the group whose tensors are.
            AverageNotFinite: What came out is not finite all the same.
        """
        group_info, said = self._detached(group_info)
        refused = judge(said)
        trace = TRACE.get() or StepTrace()
        trace.excluded |= self.peer_id in refused
        if len(refused) == len(group_info.peer_ids):
            raise NobodyElse("what this group was about to average is not finite")
        if trace.excluded:
            kwargs["weight"] = 0.0
            async with enter_asynchronously(self.get_tensors()) as tensors:
                for tensor in floats(tensors):
                    tensor.zero_()
        result: RoundResult = await super()._aggregate_with_group(
            group_info, min_vector_size, excluded=frozenset(refused), **kwargs
        )
        reducers: dict[Any, str] = {}
        for runner in self._runners(group_info.group_id).values():
            reducers.update(runner.refused())
        late = {peer: Refusal(reason) for peer, reason in reducers.items() if peer not in refused}
        result.rejected = tuple(
            {"offender": str(peer), **asdict(refusal)} for peer, refusal in (refused | late).items()
        )
        result.excluded = trace.excluded
        if not math.isfinite(sum_of(floats(self._averaged_tensors))):
            raise AverageNotFinite("the average that came back is not finite")
        norms = [a.norm for peer, a in said.items() if peer not in refused and a.norm > 0]
        self._remember(norms, directions(said).get(self.peer_id))
        return result

    def _detached(self, group_info: GroupInfo) -> tuple[GroupInfo, dict[PeerID, Announcement]]:
        """Return the group as without announcements, and these."""
        gathered, said = [], {}
        for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
            bandwidth, mode, content = self.serializer.loads(data)
            content, announcement = detached(content)
            gathered.append(self.serializer.dumps([bandwidth, mode, content]))
            if announcement is not None:
                said[peer] = announcement
        return GroupInfo(group_info.group_id, group_info.peer_ids, tuple(gathered)), said

    def _remember(self, norms: list[float], own_cosine: float | None) -> None:
        if self._usual is None or self._leans is None:
            self._usual, self._leans = deque(maxlen=REMEMBERED), deque(maxlen=LEANING)
        if norms:
            self._usual.append(median_low(norms))
        if own_cosine is not None:
            self._leans.append(own_cosine)


class GuardedState(Guarded):
    """The same for parameters, weighted by what peers did while they had lost each other.

    They gather the round, who was with them, and how many rounds they did so; see :func:`weights`.
    """

    sketches = False

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> RoundResult:
        clean, _ = self._detached(group_info)
        told = {}
        for peer, data in zip(clean.peer_ids, clean.gathered, strict=True):
            content = self.serializer.loads(self.serializer.loads(data)[2])
            if isinstance(content, (list, tuple)) and len(content) == 3:
                told[peer] = (tuple(content[1]), content[2])
        if self.peer_id in told and kwargs.get("weight"):
            kwargs["weight"] *= weights(told)[self.peer_id]
        return await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)


class GuardedFactors(Guarded):
    """The same for an averager with error feedback."""

    @property
    def _contributes(self) -> bool:
        """Whether its tensors entered the average."""
        trace, step = TRACE.get(), STEP.get()
        excluded = trace is not None and trace.excluded
        return not excluded and (step is None or step.weight > STALE_WEIGHT)


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that can be corrupt in the ways that are looked for here, as they are."""
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all tensors together; inf or NaN if an element is."""
    norms = (float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in tensors)
    return math.sqrt(sum(norm * norm for norm in norms))


def sum_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of all elements, which is finite only if all of them are."""
    return sum(float(tensor.sum(dtype=torch.float32)) for tensor in tensors)


def _attached(gathered: bytes, said: Announcement) -> bytes:
    """Return serialized data that is gathered with an announcement behind it."""
    content = MSGPackSerializer.loads(gathered)
    items = list(content) if isinstance(content, (list, tuple)) else [content]
    alone = not isinstance(content, (list, tuple))
    told = list(astuple(said))
    return bytes(MSGPackSerializer.dumps([*items, {_KEY: told, "alone": alone}]))


def detached(gathered: bytes) -> tuple[bytes, Announcement | None]:
    """Undo what :func:`_attached` did; data without an announcement stays as it is."""
    content = MSGPackSerializer.loads(gathered)
    last = content[-1] if isinstance(content, (list, tuple)) and content else None
    if not isinstance(last, dict) or _KEY not in last:
        return gathered, None
    rest = list(content[:-1])
    return MSGPackSerializer.dumps(rest[0] if last["alone"] else rest), Announcement(*last[_KEY])
