"""All-reduce of one group that counts its payload and tracks its replies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing, suppress
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import attach_event_on_finished

from rayhive.averaging.aggregation import RULES
from rayhive.averaging.answers import AVERAGE, HANGS_UP
from rayhive.averaging.parts import PartMessage, in_threads, numbered
from rayhive.averaging.reducing import Reducing
from rayhive.averaging.round_result import PhaseRecord
from rayhive.averaging.streams import until
from rayhive.averaging.tensor_parts import TensorParts, balanced_partition, partition_of
from rayhive.averaging.timeouts import in_time
from rayhive.averaging.transport import DaemonTransport, Transport
from rayhive.compression.shares import Shares
from rayhive.spec import Aggregation

#: Reason for missing answers of a lost peer.
ABSENT = "it is no longer there"
#: Answers of a reducer that takes no part in this all-reduce, or no longer.
OVER = (averaging_pb2.BAD_GROUP_ID, averaging_pb2.CANCELLED)


class MeasuredAllReduce(Reducing):
    """One all-reduce of one group, as a sender and as a reducer.

    A peer's part is over when its own tensors are averaged. As a reducer it may still be sending
    answers then; :meth:`drain` waits for these answers, after which the counts are final.

    Attributes:
        failures: Reasons why parts did not come back averaged, by reducer.

    Args:
        excluded: Senders that get the average without entering it.
        absent: Ids of lost peers; nothing is sent to them or awaited from them.
        aggregation: Aggregation rule of this peer as a reducer.
        differences: Answer with differences instead of averages, see
            :mod:`rayhive.averaging.answers`.
        shares: Share of the payload that each member reduces; None for hivemind's partition, by
            ``peer_fractions`` and ``part_size_bytes``, in a group with members of hivemind.
        alpha: Weight of the averages against the present values of the tensors.
        owed: Tensors to which the errors of this peer's encodings are added, see
            :class:`TensorParts`; errors of differences are not.
        transport: Way to the reducers; through the daemon by default.
        exact: Number of the last tensors, which no codec encodes.
        kwargs: As hivemind's.
    """

    def __init__(
        self,
        excluded: frozenset[PeerID] = frozenset(),
        absent: frozenset[bytes] = frozenset(),
        aggregation: Aggregation = "mean",
        differences: bool = False,
        shares: Shares | None = None,
        alpha: float = 1.0,
        owed: Sequence[torch.Tensor] | None = None,
        transport: Transport | None = None,
        exact: int = 0,
        *,
        tensors: Sequence[torch.Tensor],
        tensor_infos: Sequence[CompressionInfo] | None = None,
        compression: CompressionBase | None = None,
        prefetch: int = 1,
        **kwargs: Any,
    ) -> None:
        codec = NoCompression() if compression is None else compression
        if shares is None and (exact or getattr(codec, "of_gradients", False)):
            lacks = "extra tensors" if exact else type(codec).__name__
            raise AllreduceException(f"a plain hivemind peer in the group cannot decode {lacks}")
        if tensor_infos is None:
            tensor_infos = [CompressionInfo.from_tensor(x, key=at) for at, x in enumerate(tensors)]
        cut: dict[str, Any] = {"tensors": tensors, "tensor_infos": tensor_infos}
        if shares is not None:  # nothing for hivemind to cut
            cut = {"tensors": (), "tensor_infos": ()}
        super().__init__(compression=codec, **cut, **kwargs)
        self._transport = transport or DaemonTransport(self._get_peer_stub)
        if shares is None:
            partition = partition_of(self.tensor_part_container)
        else:
            partition = balanced_partition(tensors, tensor_infos, codec, shares, exact)
        container = TensorParts(
            tensors,
            partition,
            compression=codec,
            exact=exact,
            infos=tensor_infos,
            prefetch=prefetch,
            alpha=alpha,
            owed=owed,
            weight=self.weight,
        )
        self.tensor_part_container = container
        self.parts_for_local_averaging = ()
        self.prepare(RULES[aggregation], excluded, differences)
        self.failures: list[str] = []
        self._began = time.monotonic()
        self._ended: float | None = None
        self._talks: dict[PeerID, asyncio.Future[None]] = {}
        self._absent = absent
        self._refusals_are_final = shares is not None  # hivemind also refuses early parts

    async def run(self) -> AsyncIterator[torch.Tensor]:
        """Take part in the all-reduce; yield the average of each tensor."""
        await self.forget(self._absent)
        async with aclosing(super().run()) as averages:
            async for average in averages:
                yield average

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        try:
            if peer_id.to_bytes() in self._absent:
                raise AllreduceException(ABSENT)
            own = peer_id == self.peer_id
            work = self._average_own_parts() if own else self._exchange_parts(peer_id)
            talk = self._talks[peer_id] = asyncio.ensure_future(work)
            try:
                await talk
            except asyncio.CancelledError:
                if peer_id.to_bytes() in self._absent:
                    raise AllreduceException(ABSENT) from None
                raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.failures.append(f"reducer {peer_id}: {error!r}")
                if peer_id == self.peer_id:  # no peer must wait for this one's own parts
                    await self._ban_sender(peer_id)
                    await self.tensor_part_reducer.finished.wait()  # the others get averages
            # here, as a talk that is cancelled before its first step runs no line of its own
            self.tensor_part_container.register_failed_reducer(self.ordered_peer_ids.index(peer_id))
            raise

    async def _average_own_parts(self) -> None:
        """Add this peer's own parts to the averages that it makes, and take these."""
        container, sender = self.tensor_part_container, self.sender_peer_ids.index(self.peer_id)
        for index in range(container.num_parts_by_peer[self._own]):
            part = container.part(self._own, index)
            average = await self.tensor_part_reducer.accumulate_part(
                sender, index, part, weight=self.weight
            )
            if self._answers is not None:
                average = (await self._answers.encoded(index, average)).value
            container.register_processed_part(self._own, index, average)

    async def _exchange_parts(self, reducer: PeerID) -> None:
        """Send a reducer its parts, and take the averages from its answers."""
        container, at = self.tensor_part_container, self.ordered_peer_ids.index(reducer)
        expected, averaged, opened = container.num_parts_by_peer[at], 0, None
        answered = itertools.count(1)

        async def averages(answers: AsyncIterator[Any]) -> Any:
            async for answer in answers:
                if answer.code != averaging_pb2.AVERAGED_PART:
                    if answer.code in OVER and self._refusals_are_final:
                        await self.give_up([reducer])
                    code = averaging_pb2.MessageCode.Name(answer.code)
                    raise AllreduceException(f"{reducer} sent {code}")
                yield answer.tensor_part

        def decoded(answer: tuple[int, Any]) -> torch.Tensor:
            """Return the average, whether the answer is the average or a difference."""
            index, message = answer
            value = container.decoded(at, index, message)
            return value if message.chunks == AVERAGE else container.part(at, index) + value

        try:
            all_sent = asyncio.Event()
            parts = attach_event_on_finished(self._generate_input_for_peer(at), all_sent)
            opened = await self._transport.aggregate(reducer, parts, self.reducer_timeout)
            stream = self._received(until(opened, lambda _: next(answered) == expected))
            if self.should_delay_results(self.peer_id):
                await all_sent.wait()
            answers = numbered(averages(in_time(stream, self.reducer_timeout)))
            at_once, prefetch = container.at_once, container.prefetch
            async for average in in_threads(decoded, answers, at_once, prefetch):
                container.register_processed_part(at, averaged, average)
                averaged += 1
            if averaged != expected:
                raise AllreduceException(f"{reducer} averaged {averaged} of {expected} parts")
        finally:
            if opened is not None:  # else a part might be sent after its memory has changed
                with suppress(RuntimeError):  # it is being closed
                    await opened.aclose()

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[PartMessage]:
        code, group_id = averaging_pb2.PART_FOR_AVERAGING, self.group_id
        encoded: Any = self.tensor_part_container.iterate_input_parts_for(peer_index, HANGS_UP)
        async with aclosing(encoded) as parts:
            async for part in parts:
                self.sent_bytes += len(part.buffer)
                yield PartMessage(code, part, group_id, self.weight)
                code, group_id = 0, b""  # named in the first message only

    @property
    def succeeded(self) -> bool:
        """Whether this peer's own part in the all-reduce ended, and was not broken off."""
        over: asyncio.Future[None] = self._future
        return over.done() and not over.cancelled() and over.exception() is None

    @property
    def got_everything(self) -> bool:
        """Whether all tensors of this peer came back averaged."""
        return not self.tensor_part_container.failed_size

    async def forget(self, gone: Collection[bytes]) -> None:
        """Stop waiting for parts and answers of lost peers."""
        self._absent = self._absent.union(gone)  # the talk with one may be about to begin
        for peer in self.sender_peer_ids:
            if peer.to_bytes() in gone:
                await self._ban_sender(peer)
        for peer, talk in self._talks.items():
            if peer.to_bytes() in gone:  # a cut link gives no sign
                talk.cancel()

    def fraction(self) -> float:
        """Return the share of the averaging that happened, the worse of both sides.

        As a sender: elements that came back averaged, divided by all elements. As a reducer:
        elements of all senders, its own included, that entered its averages, divided by the
        expected elements.
        """
        container, reducer = self.tensor_part_container, self.tensor_part_reducer
        averaged: float = 1.0 - container.failed_size / max(1, container.total_size)
        sizes = [shape.numel() for shape in reducer.part_shapes]
        expected = sum(sizes) * reducer.num_senders
        if not expected:
            return averaged
        entered = sum(sum(sizes[:parts]) for parts in self._parts_entered())
        return min(averaged, float(entered / expected))

    def replaced(self) -> float:
        """Return the share of this peer's tensors that averages have replaced so far."""
        container = self.tensor_part_container
        return container.averaged_size / max(1, container.total_size)

    def finalize(self, **kwargs: Any) -> None:
        """End this peer's own part in the all-reduce as hivemind does, and note the time."""
        if self._ended is None:
            self._ended = time.monotonic()
        super().finalize(**kwargs)
        self.all_senders_started.set()  # else hivemind waits for lost senders as well

    def record(self, name: str) -> PhaseRecord:
        """Return the measurements so far, under the name of the phase."""
        ended = time.monotonic() if self._ended is None else self._ended
        return PhaseRecord(
            name=name,
            seconds=ended - self._began,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            fraction=self.fraction(),
        )
