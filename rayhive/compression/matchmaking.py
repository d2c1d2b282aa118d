"""hivemind's matchmaking with a group size that follows the live peers.

hivemind's leader waits out the whole window unless ``target_group_size`` is reached, and that
size is fixed when the averager starts. Here the trainer changes it between and during searches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.utils import MSGPackSerializer

from rayhive.compression.groups import GroupBook


@dataclass
class StepTrace:
    """What one step of an averager went through; times are of ``time.monotonic``.

    Attributes:
        searches: Begin and end of each search for a group.
        triggered: When the trainer let the all-reduce begin.
        groups: Ids of the groups that were found.
        wasted_bytes: Sent in attempts that failed.
    """

    searches: list[tuple[float, float]] = field(default_factory=list)
    triggered: float | None = None
    groups: list[bytes] = field(default_factory=list)
    wasted_bytes: int = 0

    def waited(self) -> float:
        """Return the seconds of searching after the trigger."""
        if self.triggered is None:
            return 0.0
        return sum(max(0.0, end - max(begin, self.triggered)) for begin, end in self.searches)


#: The step that the current task belongs to: every step is a task of its own.
TRACE: ContextVar[StepTrace | None] = ContextVar("TRACE", default=None)


class LiveMatchmaking(Matchmaking):
    """Matchmaking that assembles a group as soon as the live peers are in it.

    Args:
        args: As hivemind's.
        target_group_size: The size to begin with; None waits out the window.
        kwargs: As hivemind's.
    """

    def __init__(self, *args: Any, target_group_size: int | None, **kwargs: Any) -> None:
        # The key manager draws a sample of the group's size from this many buckets and raises
        # when a group is larger, as it may be here. Without a number it takes the group's own.
        super().__init__(*args, target_group_size=None, **kwargs)
        self.groups = GroupBook()
        self._set_target(target_group_size)

    def _set_target(self, size: int | None) -> None:
        target = None if size is None else max(size, self.min_group_size)
        self.target_group_size = self.potential_leaders.target_group_size = target

    async def set_group_size(self, size: int | None) -> None:
        """Aim at groups of ``size`` from now on, and assemble at once if one is waiting.

        Args:
            size: Live peers, this one included; None waits out the window. A size below hivemind's
                ``min_group_size`` counts as that: alone, the first to join completes the group.
        """
        self._set_target(size)
        async with self.lock_request_join_group:
            if self._may_assemble():
                await self.leader_assemble_group()

    def _may_assemble(self) -> bool:
        """Say whether we lead a group that has reached the target size."""
        return bool(
            self.target_group_size is not None
            and self.is_looking_for_group
            and not self.client_mode
            and self.current_leader is None
            and self.current_followers
            and not self.assembled_group.done()
            and len(self.current_followers) + 1 >= self.target_group_size
        )

    @contextlib.asynccontextmanager
    async def looking_for_group(self, step_control: StepControl) -> AsyncIterator[None]:
        """Search among the peers of the same round, if the step gathers its number.

        The number becomes the bits of hivemind's group key. Without it, a peer that is a round
        behind averages what it has with another round of the others.
        """
        async with super().looking_for_group(step_control):
            round_ = _round_of(step_control)
            if round_ is not None:
                self.group_key_manager.group_bits = format(round_, "b")
            yield

    async def look_for_group(self, step: StepControl) -> GroupInfo | None:
        """Search as hivemind does, and note when; a group that is found becomes expected."""
        begin = time.monotonic()
        group = None
        try:
            group = cast("GroupInfo | None", await super().look_for_group(step))
        finally:
            trace = TRACE.get()
            if trace is not None:
                trace.searches.append((begin, time.monotonic()))
        if group is not None and trace is not None:
            trace.groups.append(group.group_id)
            self.groups.expect(group.group_id)
        return group


def _round_of(step: StepControl) -> int | None:
    """Return what a step gathers if it is the number of a round."""
    *_, gathered = MSGPackSerializer.loads(step.data_for_gather)
    value = MSGPackSerializer.loads(gathered)
    return value if isinstance(value, int) and value >= 0 else None
