"""Matchmaking of an averager: group formation among known members, hivemind's search otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from rayhive.averaging.allreduce_groups import AllReduceGroups
from rayhive.averaging.group_formation import GroupFormation, RoundIsOver
from rayhive.averaging.member_data import MemberData
from rayhive.averaging.pairing import Pairing
from rayhive.averaging.quorum import Quorum
from rayhive.averaging.steps import TRACE
from rayhive.averaging.transport import LinkTo, join_over, no_link
from rayhive.membership.view import Member

#: Extends the data that a step gathers, once its tensors are ready.
Announce = Callable[[bytes], Awaitable[bytes]]


class LiveMatchmaking(Matchmaking):
    """Matchmaking that completes the group of a round as soon as all live peers are there.

    A step that gathers a whole number, or a list that begins with one, belongs to the round with
    that number. After the first call of :meth:`set_members`, such steps meet by
    :class:`GroupFormation`. The search for a round begins when the trainer triggers the round and
    not before: a group that waits for its slowest trainer would run into the timeouts of the
    all-reduce.

    Args:
        args: As hivemind's.
        target_group_size: Size at which hivemind's own search completes a group at once.
        groups: All-reduces of the averager; found groups become expected there.
        announce: Extends the data that a step gathers, see :data:`Announce`.
        prepare: Called in the task of a step that begins to look for a group.
        quorum: Peers with which a round may begin; None awaits all live peers.
        pairs: Whether a round has a group for each pair of peers, and not one of all.
        link_to: Returns the link to a leader, or None.
        on_made: Called when it is made: hivemind's loop begins then.
        kwargs: As hivemind's.
    """

    def __init__(
        self,
        *args: Any,
        target_group_size: int | None,
        groups: AllReduceGroups,
        announce: Announce,
        prepare: Callable[[], None] = lambda: None,
        quorum: Quorum | None = None,
        pairs: bool = False,
        link_to: LinkTo = no_link,
        on_made: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        # The key manager draws a sample of the group's size from this many buckets and raises
        # when a group is larger, as it may be here. Without a number it takes the group's own.
        super().__init__(*args, target_group_size=None, **kwargs)
        self.target_group_size = self.potential_leaders.target_group_size = target_group_size
        self.group_formation = GroupFormation(
            self.peer_id,
            self.client_mode,
            self.schema_hash,
            key=self._prefix,
            ask=self._ask,
            quorum=quorum,
            pairing=Pairing(self._prefix) if pairs else None,
        )
        self._groups, self._announce, self._link_to = groups, announce, link_to
        self._prepare = prepare
        self._knows_members = False
        self._patience: float | None = None
        self._missed: int | None = None
        on_made()

    def set_members(self, members: Sequence[Member], patience: float | None = None) -> None:
        """Set the peers that take part in the run.

        Args:
            members: The peers, oldest first.
            patience: Longest wait for a group once none of them computes [s]; None for all the
                time of a step.
        """
        self._knows_members, self._patience = True, patience
        self.group_formation.set_members(members)

    async def _ask(
        self, leader: PeerID, request: averaging_pb2.JoinRequest
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        link = await self._link_to(leader)
        if link is not None:
            return join_over(link, request)
        stub = self._servicer_type.get_stub(self._p2p, leader, namespace=self._prefix)
        return cast("AsyncIterator[Any]", await stub.rpc_join_group(request))

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        """Return the group of a step, or None; record the time of the search."""
        round_, longest = round_of(step), cast("float", step.get_timeout())
        group = self._missed = None
        meets = self._knows_members and round_ is not None
        if meets:
            await step.wait_for_trigger()
        begin = time.monotonic()
        try:
            if meets:
                gather = await self._announce(step.data_for_gather)
                self._prepare()
                async with self.lock_looking_for_group:
                    group = await self.group_formation.meet(
                        cast("int", round_),
                        gather,
                        window=self.min_matchmaking_time,
                        patience=longest if self._patience is None else self._patience,
                        longest=longest,
                    )
            else:
                group = cast("GroupInfo | None", await super().look_for_group(step))
        except asyncio.TimeoutError:
            if meets:  # time in which other peers computed is not for further attempts
                _shorten(step, self.group_formation.patience_left)
        except RoundIsOver:
            self._missed = round_
            raise
        finally:
            trace = TRACE.get()
            if trace is not None:
                trace.searches.append((begin, time.monotonic()))
        if group is not None and meets and self._patience is not None:
            _shorten(step, self._patience)
        if group is not None and trace is not None:
            trace.groups.append(group.group_id)
            self._groups.expect(group.group_id)
        return group

    def leave(self, step: StepControl) -> None:
        """Note that this peer's part in the round of a step is over.

        It is not in a round that began without this peer: if that group dies, this peer comes to
        the same round again, and others can join it.
        """
        round_ = round_of(step)
        if round_ is not None and round_ != self._missed:
            self.group_formation.leave_behind(round_)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncGenerator[averaging_pb2.MessageFromLeader, None]:
        """Answer a peer that asks to join a group led by this one."""
        if self._knows_members:
            answers = self.group_formation.rpc_join_group(request, context.remote_id)
        else:
            answers = super().rpc_join_group(request, context)
        async for message in answers:
            yield message


def _shorten(step: StepControl, seconds: float) -> None:
    """Move the deadline for further attempts of a step to this many seconds from now."""
    step._deadline = min(step.deadline, get_dht_time() + seconds)


def round_of(step: StepControl) -> int | None:
    """Return the number of the round that a step belongs to; None if it names none."""
    member = MemberData.loads(step.data_for_gather)
    return round_in(MSGPackSerializer.loads(member.content))


def round_in(value: Any) -> int | None:
    """Return the round that gathered data names: a whole number, alone or first in a list."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, int) and value >= 0 else None
