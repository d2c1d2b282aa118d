"""Which rounds a peer has left behind after its steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.group_formation import NoOtherPeers, RoundIsOver
from rayhive.averaging.matchmaking import LiveMatchmaking
from rayhive.averaging.member_data import MemberData


class Formation:
    """A group formation whose search ends with an error."""

    def __init__(self, error: Exception) -> None:
        self.error, self.left = error, list[int]()

    async def meet(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    def leave_behind(self, round_: int) -> None:
        self.left.append(round_)


@pytest.mark.parametrize(("error", "left"), [(NoOtherPeers(), [7]), (RoundIsOver(), [])])
def test_a_missed_round_is_not_left_behind(error: Exception, left: list[int]) -> None:
    async def announce(data: bytes) -> bytes:
        return data

    async def triggered() -> None:
        pass

    async def body() -> list[int]:
        formation = Formation(error)
        matchmaking: Any = LiveMatchmaking.__new__(LiveMatchmaking)
        matchmaking.group_formation = formation
        matchmaking._knows_members, matchmaking._patience = True, 1.0
        matchmaking._announce, matchmaking._prepare = announce, lambda: None
        matchmaking.min_matchmaking_time = 1.0
        matchmaking.lock_looking_for_group = asyncio.Lock()
        data = MemberData(1.0, 1, MSGPackSerializer.dumps(7), steps=1).dumps()
        step: Any = SimpleNamespace(
            data_for_gather=data, get_timeout=lambda: 5.0, wait_for_trigger=triggered
        )
        with pytest.raises(type(error)):
            await matchmaking.look_for_group(step)
        matchmaking.leave(step)
        return formation.left

    assert asyncio.run(body()) == left
