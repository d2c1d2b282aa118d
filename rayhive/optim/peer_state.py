"""State of one peer that its rounds and its state synchronisation share."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_logger

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.factory import takes_over_state
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.events import AveragingReason, Event, Rejected
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.signs import SignsOfLife
from rayhive.membership.view import Reunion
from rayhive.optim.local_steps import LocalSteps
from rayhive.optim.watchdog import ProcessWatchdog

logger = get_logger(__name__)

OnEvent = Callable[[str, dict[str, Any]], None]

#: Groups of past rounds that are kept, to find the peer's side of a partition afterwards.
GROUPS_KEPT = 8


class ParameterConsistency:
    """Tracks whether a peer's parameters are those of its round. No network, no clock.

    Attributes:
        stale: The parameters are of an older round than the peer announces, so they get next to no
            weight in an average.
        keeps_gradients: The peer kept its accumulated gradients when it loaded its state. They
            count although the parameters are stale.
        settling: A state was loaded, and parameters have not been averaged since.
        diverged: Other peers refused this peer's parameters; they have to be replaced.
        returned: The peer came back from a break, and has begun no round since.
        requested: Reason for which the gradients' group averages its parameters, too.
        unsynchronised_since: The last round after which the parameters may differ between peers,
            because an averaging failed or was partial; 0 if there is none.
    """

    def __init__(self) -> None:
        self.stale = self.keeps_gradients = self.settling = self.diverged = False
        self.returned = False
        self.unsynchronised_since = 0
        self.requested: AveragingReason | None = None

    @property
    def gradients_count(self) -> bool:
        """Whether the accumulated gradients may enter an average."""
        return self.keeps_gradients or not self.stale

    def take_divergence(self) -> bool:
        """Return whether the parameters were refused since the last call."""
        diverged, self.diverged = self.diverged, False
        return diverged

    def take_return(self) -> bool:
        """Return whether the peer came back from a break since the last call."""
        returned, self.returned = self.returned, False
        return returned

    def take_request(self) -> AveragingReason | None:
        """Return the reason for which a peer asked for parameter averaging since the last call."""
        requested, self.requested = self.requested, None
        return requested

    def note_failure(self, round_: int) -> None:
        """Note that parameters may differ between peers from ``round_`` on."""
        self.unsynchronised_since = max(round_, self.unsynchronised_since)

    def note_jump(self, *, behind: bool, keeps_gradients: bool) -> None:
        """Note that the peer went on to the newest round.

        Args:
            behind: The parameters are of an older round than that.
            keeps_gradients: The accumulated gradients were kept.
        """
        self.stale |= behind
        self.keeps_gradients = keeps_gradients

    def note_caught_up(self) -> None:
        """Note that the parameters were loaded, and are those of the newest round."""
        self.stale = self.settling = False

    def note_averaged(self, round_: int) -> None:
        """Note that the parameters of ``round_`` were averaged completely.

        With delays this may come after a later round has failed, which it does not mend.
        """
        self.stale = self.settling = self.keeps_gradients = False
        if self.unsynchronised_since <= round_:
            self.unsynchronised_since = 0


class PartitionHistory:
    """Recent groups of a peer, and its latest network partition. Uses neither network nor clock.

    After a partition, the parameters of each side count by the rounds that it committed (see
    :func:`rayhive.averaging.state_averager.weights`). Each peer announces those rounds and the
    members of its side.

    Attributes:
        rounds_apart: Number of rounds that this peer committed during the partition. None without
            a partition, and after parameters were averaged with all peers that came back.
        side: Sorted ids of the peers on this peer's side that lived when the others came back.
        lost: Peer ids of the other sides.
    """

    def __init__(self) -> None:
        self.rounds_apart: int | None = None
        self.side: list[bytes] = []
        self.lost: frozenset[bytes] = frozenset()
        self._groups: deque[frozenset[bytes]] = deque(maxlen=GROUPS_KEPT)

    def note_group(self, members: Iterable[bytes]) -> None:
        """Note the group of a round: the peer ids of its members, this peer among them."""
        self._groups.append(frozenset(members))

    def was_none(self, reunion: Reunion, round_: int) -> bool:
        """Return whether the lost peers were in the group of every round since their loss.

        Group formation asks the peers themselves, so it may find one that is taken for lost.

        Args:
            reunion: The peers, and the round after which the first of them was lost.
            round_: The round that this peer has finished.
        """
        since = round_ - reunion.since
        groups = tuple(self._groups)  # a thread may append meanwhile
        together = all(reunion.peers <= group for group in groups[-since:])
        return 0 < since <= len(groups) and together

    def note_reunion(self, reunion: Reunion, round_: int, alive: AbstractSet[bytes]) -> None:
        """Note that lost peers are back.

        Lost peers come back one by one, and some are lost again for a moment while links recover.
        Rounds therefore count from the loss of the first of them.

        Args:
            reunion: The peers, and the round after which the first of them was lost.
            round_: The round that this peer has finished.
            alive: Ids of the live peers, this one included.
        """
        before, self.lost = self.rounds_apart, self.lost | reunion.peers
        self.rounds_apart = max(round_ - reunion.since, before or 0)
        if self.rounds_apart != before:
            groups = tuple(self._groups)  # a thread may append meanwhile
            # not of the last group only: a round fails easily while links recover
            without = [group for group in groups if not self.lost & group]
            self.side = sorted(alive & frozenset().union(*without))

    def note_averaged(
        self, group: Iterable[bytes], any_present: Callable[[Iterable[bytes]], bool]
    ) -> None:
        """Note that parameters were averaged; the partition is over once no peer is missing.

        A peer of this one's own side is missing, too: it brings the other part of their rounds.

        Args:
            group: Peer ids of the group.
            any_present: Returns whether any of some peers lives.
        """
        members = frozenset(group)
        if self.lost & members and not any_present((self.lost | set(self.side)) - members):
            self.reset()

    def reset(self) -> None:
        """Forget the partition: the parameters of all sides are the same again."""
        self.rounds_apart, self.lost = None, frozenset()


class EventReporter:
    """Passes an optimizer's events on to one callback.

    Args:
        on_event: Called with the kind and the fields of each event, see
            :data:`rayhive.events.KINDS`. None drops all events.
    """

    def __init__(self, on_event: OnEvent | None = None) -> None:
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Report one event."""
        if self._on_event is not None:
            self._on_event(event.kind, event.model_dump(exclude_unset=True))

    def refusals(self, round_: int, outcome: Any, tensors: str) -> None:
        """Report every refusal that the result or the error of an averaging names.

        Args:
            round_: The round.
            outcome: A result or an error; its ``rejected`` lists the refusals.
            tensors: ``gradients``, ``parameters`` or ``state``.
        """
        for refusal in getattr(outcome, "rejected", ()):
            self.refusal(Rejected(round=round_, tensors=tensors, **refusal))

    def refusal(self, event: Rejected) -> None:
        """Log and report that the tensors of one peer were refused."""
        limit = "" if event.bound is None else f" (bound {event.bound:.4g})"
        value = event.norm if event.lean is None else event.lean
        measured = "" if value is None else f" {value:.4g}"
        logger.warning(
            f"round {event.round}: the {event.tensors} of {event.offender} are refused: "
            f"{event.reason}{measured}{limit}"
        )
        self.emit(event)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(frozen=True)
class PeerState:
    """Collaborators of one peer's optimizer, and the state that they share.

    Attributes:
        tracker: The peer's announcements, and the progress of the swarm.
        state_averager: Owner of parameters, inner optimizer and the peer's round.
        grad_averager: The gradient averager.
        watchdog: Ends a wait for a process that died.
        reporter: Destination of events.
        averaging_timeout: Longest time of one averaging without progress [s].
        round_timeout: Longest time from the start of a round to its result, without progress [s].
        consistency: Whether the peer's parameters count, and whether they need averaging.
        partitions: Groups of past rounds, and the partition that the peer was in.
        local_steps: Its local parameters; None if it steps in rounds only.
        parameters_reported: Set unless the outcome of an averaging of parameters is not recorded.
    """

    tracker: LiveProgressTracker
    state_averager: RayhiveStateAverager
    grad_averager: GradientAverager
    watchdog: ProcessWatchdog
    reporter: EventReporter
    averaging_timeout: float
    round_timeout: float
    consistency: ParameterConsistency = field(default_factory=ParameterConsistency)
    partitions: PartitionHistory = field(default_factory=PartitionHistory)
    local_steps: LocalSteps | None = None
    parameters_reported: threading.Event = field(default_factory=_set_event)

    @property
    def rounds_apart(self) -> int | None:
        """Rounds that this peer committed in a partition whose other side is back.

        None without a partition, and while no peer of the other side is alive: one that died before
        parameters were averaged with it must not keep this peer from catching up for ever.
        """
        apart = self.partitions.rounds_apart
        if apart is None or not self.tracker.swarm.any_present(self.partitions.lost):
            return None
        return apart

    @property
    def merges_rounds(self) -> bool:
        """Whether this peer merges the work of its side of a partition instead of catching up."""
        apart = self.rounds_apart
        return bool(apart) or (apart is not None and not self.quorum)

    @property
    def quorum(self) -> bool:
        """Whether rounds may begin without a peer that computes."""
        return self.tracker.quorum

    @property
    def untrained(self) -> bool:
        """Whether this peer joined a run whose state it has not got yet."""
        return self.tracker.view.own.untrained

    def set_untrained(self, untrained: bool) -> None:
        """Announce whether this peer is untrained; if it is, no other peer loads its state."""
        for averager in (self.state_averager, self.grad_averager):
            if averager.client_mode or not takes_over_state(type(averager)):
                continue
            averager.allow_state_sharing = not untrained
        self.tracker.set_untrained(untrained)

    @property
    def pairs(self) -> bool:
        """Whether rounds average in random pairs, so that each peer has parameters of its own."""
        return self.local_steps is not None and self.local_steps.rule.pairs

    def moved(self) -> float:
        """Return the time at which bulk data of this peer moved last [s]."""
        return max((signs.newest() for signs in self._signs()), default=-math.inf)

    def sign_of(self, peer: bytes) -> float:
        """Return the time at which bulk data showed last that another peer lives [s]."""
        return max((signs.last(peer) for signs in self._signs()), default=-math.inf)

    def _signs(self) -> list[SignsOfLife]:
        averagers = (self.state_averager, self.grad_averager)
        return [each.signs for each in averagers if isinstance(each, MeasuredAverager)]

    @property
    def averaging_reason(self) -> AveragingReason | None:
        """Reason to average parameters in the next round, due or not; None if there is none."""
        if self.consistency.stale or self.consistency.settling:
            return "joined"
        if not self.consistency.unsynchronised_since:
            return None
        return "failed_round" if self.partitions.rounds_apart is None else "partition"
