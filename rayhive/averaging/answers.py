"""Answers of a reducer to its senders.

A reducer of hivemind sends each sender the difference between the average and the sender's own
part, encoded for that sender alone. With a lossy codec every peer then ends with another value.
Here the average itself is encoded, once, and every peer applies the decoded value, the reducer
included: replicas that begin equal stay equal to the bit.

Parameters through a lossy codec are the exception: the difference between almost equal replicas is
small, and so is its error, while the error of encoded parameters is not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hivemind.compression import serialize_torch_tensor

from rayhive.averaging.parts import Part, is_plain, part_of
from rayhive.averaging.tensor_parts import TensorParts

#: Value of ``Tensor.chunks`` in every part of a rayhive sender: it closes the stream after the last
#: answer. hivemind leaves the field at 0, does not read it, and waits for the reducer to close.
HANGS_UP = 1
#: The same in an answer that is an average; 0 is a difference, as in hivemind.
AVERAGE = 2


@dataclass(frozen=True)
class EncodedAverage:
    """One average as it travels.

    Attributes:
        part: The encoded average.
        value: The average after decoding, which every peer applies.
    """

    part: Part
    value: torch.Tensor


class Answers:
    """Encodes the averages of one reducer, each of them once.

    An average is kept until every sender has it. One that waits for a sender that was given up
    stays until the end of the all-reduce.

    Args:
        parts: The parts of the all-reduce.
        own: Position of the reducer in its group.
        weights: Sum of the weights that entered each average.
        senders: Number of senders; each of them asks for each average once.
    """

    def __init__(
        self, parts: TensorParts, own: int, weights: Sequence[float], senders: int
    ) -> None:
        self._parts, self._own, self._weights = parts, own, weights
        self._senders = senders
        self._encoded: dict[int, asyncio.Future[EncodedAverage]] = {}
        self._asked: Counter[int] = Counter()

    async def encoded(self, index: int, average: torch.Tensor) -> EncodedAverage:
        """Return the encoded average of a part; encode it if this is the first call for it."""
        if index not in self._encoded:
            self._encoded[index] = self._begin(index, average)
        future = self._encoded[index]
        self._asked[index] += 1
        if self._asked[index] == self._senders:
            del self._encoded[index], self._asked[index]
        await asyncio.wait({future})  # not awaited directly: a sender that leaves would cancel it
        return future.result()

    def _begin(self, index: int, average: torch.Tensor) -> asyncio.Future[EncodedAverage]:
        loop = asyncio.get_running_loop()
        if not self._parts.at_once:
            return loop.run_in_executor(None, self._encode, index, average)
        future = loop.create_future()
        future.set_result(self._encode(index, average))
        return future

    def _encode(self, index: int, average: torch.Tensor) -> EncodedAverage:
        part = self._parts.encoded(self._own, index, average, AVERAGE)
        if is_plain(average, self._parts.compression):
            return EncodedAverage(part, average)
        self._parts.owe(self._own, index, part, average, self._weights[index])
        return EncodedAverage(part, self._parts.decoded(self._own, index, part))


async def difference(average: torch.Tensor, part: torch.Tensor, compression: int) -> Part:
    """Return hivemind's answer: the encoded difference between an average and a sender's part."""
    loop = asyncio.get_running_loop()
    encode = serialize_torch_tensor
    return part_of(await loop.run_in_executor(None, lambda: encode(average - part, compression)))
