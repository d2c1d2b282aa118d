"""Data that each member of a group sends to the leader, and that all members get."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from hivemind.averaging.allreduce import AveragingMode
from hivemind.utils import MSGPackSerializer

from rayhive.compression.partition import PARTITION_VERSION


@dataclass(frozen=True)
class MemberData:
    """Data of one member of a group.

    hivemind's members send the first three fields, and read no others.

    Attributes:
        bandwidth: Rate of its link, in a unit that is equal for all members; None if unknown.
        mode: Value of hivemind's ``AveragingMode``.
        content: Data of the step, serialized.
        partition: Version of the partition that the member can use; None for hivemind's own.
        steps: Steps of an optimizer that its tensors sum up; 1 for gradients and parameters.
    """

    bandwidth: float | None
    mode: int
    content: bytes
    partition: int | None = PARTITION_VERSION
    steps: int = 1

    @classmethod
    def loads(cls, data: bytes) -> MemberData:
        """Return the data of a member, of rayhive or of hivemind."""
        bandwidth, mode, content, *ours = MSGPackSerializer.loads(data)
        return cls(bandwidth, mode, content, *(ours or [None]))

    def dumps(self) -> bytes:
        """Return the serialized data."""
        fields = astuple(self)
        return bytes(MSGPackSerializer.dumps(fields if self.partition else fields[:3]))

    @property
    def rate(self) -> float | None:
        """Rate of the link of a member that can reduce; 0 for one that cannot be called."""
        return 0.0 if self.mode == AveragingMode.CLIENT.value else self.bandwidth
