"""Exclusion of corrupt tensors from a round before they reach another peer.

Before a group averages, each member announces the norm of its tensors, see
:mod:`rayhive.averaging.outlier_filter`. Announcements travel with the data that the group gathers
anyway, so that all members reach the same verdict without another message. A refused peer reaches
the same verdict: it contributes nothing, with weight 0. It gets the whole average of the other
peers, or keeps its tensors.

The filter is for broken peers, not for malicious ones. As a second line, each reducer refuses
parts that are not finite (:mod:`rayhive.averaging.aggregation`), and a round whose average is not
finite fails.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.member_data import MemberData
from rayhive.averaging.outlier_filter import Announcement, OutlierFilter, Refusal
from rayhive.averaging.tensor_summary import floats

#: Number of elements from which on tensors are read in a thread instead of the event loop.
LARGE = 1_000_000
_KEY = "outlier_filter"


class AverageNotFinite(Exception):
    """The average of a round is not finite, although all tensors that entered it were."""


async def announced(
    outlier_filter: OutlierFilter, data_for_gather: bytes, tensors: Sequence[torch.Tensor]
) -> bytes:
    """Return the data that a step gathers, extended by this peer's announcement."""
    member = MemberData.loads(data_for_gather)
    tensors, announce = floats(tensors), partial(outlier_filter.announce, steps=member.steps)
    if sum(tensor.numel() for tensor in tensors) < LARGE:
        announcement = announce(tensors)
    else:
        loop = asyncio.get_running_loop()
        announcement = await loop.run_in_executor(None, announce, tensors)
    return replace(member, content=attached(member.content, announcement)).dumps()


def separated(group_info: GroupInfo) -> tuple[GroupInfo, dict[PeerID, Announcement]]:
    """Return the group without announcements, and the announcements of its members.

    A member without the filter announces nothing.
    """
    gathered, announcements = [], {}
    for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
        member = MemberData.loads(data)
        content, announcement = detached(member.content)
        gathered.append(replace(member, content=content).dumps())
        if announcement is not None:
            announcements[peer] = announcement
    return GroupInfo(group_info.group_id, group_info.peer_ids, tuple(gathered)), announcements


@contextmanager
def replaced_tensors(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield zeros to average instead of tensors that are refused; then copy the averages back.

    Zeros in the tensors themselves would outlive a round that fails, and an offloaded optimizer
    would step on them.
    """
    averages = [torch.zeros_like(tensor) for tensor in tensors]
    yield averages
    with torch.no_grad():
        for tensor, average in zip(tensors, averages, strict=True):
            tensor.copy_(average)


def check_finite(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse averages that are not finite.

    Raises:
        AverageNotFinite: An element is not finite.
    """
    if not are_finite(tensors):
        raise AverageNotFinite("the average of the round is not finite")


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements, and their sum, are finite."""
    return math.isfinite(sum(float(t.sum(dtype=torch.float32)) for t in floats(tensors)))


def refusal_records(refused: Mapping[PeerID, Refusal]) -> tuple[dict[str, Any], ...]:
    """Return refusals in the form of ``RoundResult.rejected``."""
    return tuple({"offender": str(peer), **asdict(why)} for peer, why in refused.items())


def attached(gathered: bytes, announcement: Announcement) -> bytes:
    """Return serialized gathered data with an announcement appended."""
    content = MSGPackSerializer.loads(gathered)
    items = list(content) if isinstance(content, (list, tuple)) else [content]
    alone = not isinstance(content, (list, tuple))
    fields = list(astuple(announcement))
    return bytes(MSGPackSerializer.dumps([*items, {_KEY: fields, "alone": alone}]))


def detached(gathered: bytes) -> tuple[bytes, Announcement | None]:
    """Undo :func:`attached`; return data without an announcement unchanged."""
    content = MSGPackSerializer.loads(gathered)
    last = content[-1] if isinstance(content, (list, tuple)) and content else None
    if not isinstance(last, dict) or _KEY not in last:
        return gathered, None
    rest = list(content[:-1])
    return MSGPackSerializer.dumps(rest[0] if last["alone"] else rest), Announcement(*last[_KEY])


class ExcludedRoundFailed(Exception):
    """An excluded peer did not get the average of a round.

    Its own tensors were refused, so it has no valid tensors for the next step.

    Args:
        reason: The error.
        rejected: The refused peers and the reason for each, as ``RoundResult.rejected``.
    """

    def __init__(self, reason: str, rejected: tuple[dict[str, Any], ...] = ()) -> None:
        super().__init__(reason, rejected)  # both, as it is pickled on its way to the trainer
        self.rejected = rejected

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[0]!r})"
