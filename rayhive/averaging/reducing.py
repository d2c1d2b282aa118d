"""Side of an all-reduce that averages the parts of all senders, and answers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.averaging.partition import BannedException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_logger
from hivemind.utils.asyncio import achain, as_aiter

from rayhive.averaging.aggregation import Rule, SteadyReducer
from rayhive.averaging.answers import HANGS_UP, Answers, difference
from rayhive.averaging.parts import PartMessage, in_threads, numbered
from rayhive.averaging.streams import PATIENCE
from rayhive.averaging.tensor_parts import TensorParts
from rayhive.averaging.timeouts import in_time
from rayhive.averaging.transport import LinkCall

logger = get_logger(__name__)


class Reducing(AllReduceRunner):
    """All-reduce of one group, as a reducer.

    Attributes:
        tensor_part_container: The parts of all tensors.
        tensor_part_reducer: Averages the parts of which this peer is the reducer.
        sent_bytes: Payload of parts for other reducers and of answers to other senders.
        received_bytes: Payload of answers from reducers and of parts from senders.
    """

    tensor_part_container: TensorParts
    tensor_part_reducer: SteadyReducer

    def prepare(self, rule: Rule | None, excluded: frozenset[PeerID], differences: bool) -> None:
        """Prepare for parts, once the container holds the tensors.

        Args:
            rule: Aggregation rule; None for the mean.
            excluded: Senders that get the average without entering it.
            differences: Answer with differences instead of averages, see
                :mod:`rayhive.averaging.answers`.
        """
        self.sent_bytes = self.received_bytes = 0
        container, senders = self.tensor_part_container, self.sender_peer_ids
        self._own = self.ordered_peer_ids.index(self.peer_id)
        shapes = tuple(torch.Size([size]) for size in container.elements(self._own))
        reducer = self.tensor_part_reducer = SteadyReducer(shapes, len(senders))
        reducer.excluded = frozenset(at for at, peer in enumerate(senders) if peer in excluded)
        reducer.rule = rule
        answers = Answers(container, self._own, reducer.weights, len(senders))
        self._answers = None if differences else answers
        others = set(senders) - {self.peer_id}
        self._unanswered: set[PeerID] = others if reducer.num_parts else set()
        self._answered = asyncio.Event()
        self._hanging_up: set[PeerID] = set()

    async def _received(
        self, stream: AsyncIterable[Any], sender: PeerID | None = None
    ) -> AsyncIterator[Any]:
        """Pass a stream through and count its payload; note a sender that hangs up."""
        async for message in stream:
            if message.tensor_part is not None:
                self.received_bytes += len(message.tensor_part.buffer)
                if sender is not None and message.tensor_part.chunks == HANGS_UP:
                    self._hanging_up.add(sender)
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Average a sender's parts and answer, counting the payload in both directions.

        Messages of both directions may be hivemind's, or :class:`PartMessage`. hivemind limits
        waits by ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that comes with
        a message: it would await a sender that hung up.
        """
        sender, sent = context.remote_id, 0
        self.active_senders.add(sender)
        if self.active_senders.issuperset(self.sender_peer_ids):
            self.all_senders_started.set()
        messages = in_time(self._received(stream, sender), self.sender_timeout)
        try:
            async with aclosing(messages), aclosing(self._replies(messages, context)) as replies:
                async for message in replies:
                    if message.tensor_part is not None:
                        self.sent_bytes += len(message.tensor_part.buffer)
                    sent += 1
                    yield message
        except Exception as error:
            logger.debug(f"the parts of {sender} broke off: {error!r}")
            await self._ban_sender(sender)
            yield averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)
        except BaseException:
            await self._ban_sender(sender)
            raise
        finally:
            self._unanswered.discard(sender)
            self._answered.set()
        hangs_up = sender in self._hanging_up and not isinstance(context, LinkCall)
        if hangs_up and sent == self.tensor_part_reducer.num_parts:
            await asyncio.sleep(PATIENCE)  # the sender hangs up first, which cancels this

    async def _replies(
        self, messages: AsyncIterator[Any], context: P2PContext
    ) -> AsyncGenerator[Any, None]:
        """Yield the answers to a sender, or why its parts are refused."""
        sender, request = context.remote_id, await anext(messages)
        refusal = self._check_reasons_to_reject(request, context)
        if refusal is not None:
            yield refusal
            return
        if request.code != averaging_pb2.PART_FOR_AVERAGING:
            code = averaging_pb2.MessageCode.Name(request.code)
            raise AllreduceException(f"{sender} sent {code}")
        parts = achain(as_aiter(request), messages)
        index = self.sender_peer_ids.index(sender)
        async with aclosing(self._accumulate_parts_streaming(parts, index)) as answers:
            if self.should_delay_results(sender):  # it reads no answer before its parts have left
                for answer in [answer async for answer in answers]:
                    yield answer
            else:
                async for answer in answers:
                    yield answer

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[Any], sender_index: int
    ) -> AsyncGenerator[PartMessage, None]:
        """Add a sender's parts to the averages; yield an answer to each of them."""
        reducer, sender = self.tensor_part_reducer, self.sender_peer_ids[sender_index]
        container = self.tensor_part_container
        answered = 0

        def decoded(received: tuple[int, Any]) -> tuple[Any, torch.Tensor]:
            index, message = received
            return message, container.decoded(self._own, index, message.tensor_part)

        parts, at_once, prefetch = numbered(stream), container.at_once, container.prefetch
        arrived = in_threads(decoded, parts, at_once, prefetch)
        accumulate = partial(reducer.accumulate_part, sender_index)
        try:
            async with aclosing(arrived):
                async for message, part in arrived:
                    try:
                        average = await accumulate(answered, part, message.weight)
                    except BannedException:
                        break
                    answer = await self._answer(sender, answered, message, part, average)
                    answered += 1
                    yield PartMessage(averaging_pb2.AVERAGED_PART, answer)
        finally:
            if answered != reducer.num_parts:
                await self._ban_sender(sender)

    async def _answer(
        self, sender: PeerID, index: int, message: Any, part: torch.Tensor, average: torch.Tensor
    ) -> Any:
        """Return the encoded answer to a sender's part."""
        if sender not in self._hanging_up:  # a member of hivemind
            return await difference(average, part, message.tensor_part.compression)
        if self._answers is not None:
            return (await self._answers.encoded(index, average)).part
        encode, value = self.tensor_part_container.encoded, average - part
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, encode, self._own, index, value)

    async def drain(self, patience: float) -> bool:
        """Wait until every sender that was not given up has its last answer.

        Args:
            patience: Longest wait [s].

        Returns:
            Whether all answers were sent; the counts are final then.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while self._unanswered - self.banned_senders:
            self._answered.clear()
            try:
                await asyncio.wait_for(self._answered.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return False
        return True

    async def give_up(self, peers: Collection[PeerID]) -> None:
        """Stop waiting for first parts of peers that take no part in this all-reduce any more."""
        for peer in set(self.sender_peer_ids).intersection(peers) - self.active_senders:
            await self._ban_sender(peer)

    def banned(self) -> set[str]:
        """Return the senders that were given up before all their parts had entered."""
        parts = self.tensor_part_reducer.num_parts
        entered = zip(self.sender_peer_ids, self._parts_entered(), strict=True)
        return {str(peer) for peer, count in entered if count < parts}

    def refused(self) -> set[PeerID]:
        """Return the senders whose parts were refused here, because they were not finite."""
        return {self.sender_peer_ids[at] for at in self.tensor_part_reducer.refused}

    def _parts_entered(self) -> list[int]:
        """Return how many parts of each sender entered the averages made here."""
        reducer = self.tensor_part_reducer
        counts = zip(reducer.num_parts_received, reducer.sender_failed_after, strict=True)
        return [int(min(received, failed)) for received, failed in counts]
