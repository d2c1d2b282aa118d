"""Settings and names of the averagers, without a swarm."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.proto import averaging_pb2

from rayhive.averaging import state_download
from rayhive.averaging.allreduce_groups import AllReduceGroups
from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.averaging.matchmaking import LiveMatchmaking
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.steps import StepTrace
from rayhive.averaging.streams import Cancellations
from tests.unit.averaging_fakes import OTHER, PEER, settle, stream_of, unstarted

SHAPES = [(4, 3)]
PAIRS = [
    (RayhiveGradientAverager, GradientAverager),
    (RayhivePowerSGDAverager, PowerSGDGradientAverager),
    (RayhiveStateAverager, TrainingStateAverager),
]


async def calls_of(kind: Any, namespace: str | None) -> list[tuple[str, type]]:
    """Return the name and the type of the answer of each remote procedure that a stub calls."""
    calls = []

    async def iterate(peer: Any, name: str, request: Any, answer: type) -> None:
        calls.append((name, answer))

    stub = kind.get_stub(
        SimpleNamespace(iterate_protobuf_handler=iterate), OTHER, namespace=namespace
    )
    for method in sorted(name for name in dir(DecentralizedAverager) if name.startswith("rpc_")):
        await getattr(stub, method)(None)
    return calls


@pytest.mark.parametrize("namespace", ["run", None])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_rpcs_have_hiveminds_names(ours: Any, theirs: Any, namespace: str | None) -> None:
    """Also when hivemind's class was asked first: a class inherits its parent's stubs."""
    prefix = "" if namespace is None else f"{namespace}::"
    expected = [
        (f"{prefix}{theirs.__name__}.{name.rpartition('.')[2]}", answer)
        for name, answer in asyncio.run(calls_of(theirs, namespace))
    ]
    assert expected and asyncio.run(calls_of(ours, namespace)) == expected


@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS])
def test_classes_pickle_as_themselves_and_have_few_bases(ours: Any) -> None:
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert sum(kind.__module__.startswith("rayhive.") for kind in ours.__mro__) <= 3


@pytest.mark.parametrize(
    ("options", "request_timeout", "sender_timeout", "reducer_timeout"),
    [
        ({"min_matchmaking_time": 15.0}, 3.0, 10.0, 20.0),
        ({"min_matchmaking_time": 1.0}, 0.5, 10.0, 20.0),
        ({"min_matchmaking_time": 4.0, "request_timeout": 1.0}, 1.0, 10.0, 20.0),
        # hivemind's optimizer passes its matchmaking time as next_chunk_timeout
        ({"min_matchmaking_time": 1.0, "next_chunk_timeout": 1.0}, 0.5, 10.0, 20.0),
        ({"min_matchmaking_time": 5.0, "next_chunk_timeout": 1.0}, 2.5, 1.0, 2.0),
        ({"min_matchmaking_time": 5.0, "allreduce_timeout": 8.0}, 2.5, 2.0, 4.0),
        ({"sender_timeout": 0.5, "reducer_timeout": 4.0}, 2.5, 0.5, 4.0),
    ],
)
def test_timeouts_do_not_follow_the_matchmaking_window(
    options: dict[str, Any],
    request_timeout: float,
    sender_timeout: float,
    reducer_timeout: float,
) -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES, **options)
    matchmaking, allreduce = averager.matchmaking_kwargs, averager.allreduce_kwargs
    assert matchmaking["request_timeout"] == request_timeout < matchmaking["min_matchmaking_time"]
    assert allreduce["sender_timeout"] == sender_timeout
    assert allreduce["reducer_timeout"] == reducer_timeout


async def unchanged(data: bytes) -> bytes:
    return data


def matchmaking(size: int | None) -> LiveMatchmaking:
    return LiveMatchmaking(
        SimpleNamespace(peer_id=PEER),
        b"schema",
        SimpleNamespace(peer_id=PEER),
        servicer_type=RayhiveGradientAverager,
        prefix="test",
        target_group_size=size,
        min_group_size=2,
        min_matchmaking_time=30.0,
        request_timeout=3.0,
        client_mode=False,
        groups=AllReduceGroups(),
        announce=unchanged,
    )


def test_a_group_larger_than_its_target_gets_a_key() -> None:
    """hivemind samples the members' next keys out of as many buckets as the target has."""

    async def body() -> None:
        peers = (PEER, OTHER, type(PEER)(b"a third"))
        crowd = GroupInfo(b"group", peers, (b"",) * 3)
        theirs = GroupKeyManager(SimpleNamespace(peer_id=PEER), "test", "", 2)
        with pytest.raises(ValueError, match="larger than population"):
            await theirs.update_key_on_group_assembled(crowd)
        await matchmaking(2).group_key_manager.update_key_on_group_assembled(crowd)

    asyncio.run(body())


def test_waiting_counts_from_the_trigger() -> None:
    trace = StepTrace(searches=[(10.0, 14.0), (20.0, 21.0)])
    assert trace.waited() == 0.0, "the round was not triggered yet"
    for triggered, waited in ((9.0, 5.0), (12.0, 3.0), (20.5, 0.5), (30.0, 0.0)):
        trace.triggered = triggered
        assert trace.waited() == waited


def test_a_step_that_needs_a_trigger_cannot_be_awaited() -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    with pytest.raises(ValueError, match="trigger"):
        MeasuredAverager.step(averager, require_trigger=True)


class Serving(RayhiveGradientAverager):
    """An averager whose trainer's process answers with the gradients."""

    async def _get_current_state_from_host_process(self) -> Any:
        return b"metadata", self._averaged_tensors, None


def test_a_download_ends_with_an_empty_message() -> None:
    """Plain peers append it as an empty chunk; ours hang up on it."""

    async def body() -> None:
        averager = unstarted(Serving, [(4, 3), (2,)])
        stream = averager.rpc_download_state(None, SimpleNamespace(remote_id=OTHER))
        messages = [await stream.__anext__() for _ in range(3)]
        assert [bool(message.ByteSize()) for message in messages] == [True, True, False]
        ending = asyncio.create_task(stream.__anext__())
        await settle()
        assert not ending.done()
        ending.cancel()

    asyncio.run(body())


class Answers:
    """A DHT that notes its requests."""

    client_mode, peer_id = False, PEER

    def __init__(self) -> None:
        self.said: list[str] = []

    def _answer(self, name: str) -> asyncio.Future[None]:
        self.said.append(name)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def store(self, *args: Any, value: float | None, **kwargs: Any) -> asyncio.Future[None]:
        return self._answer(f"store {value}")

    def run_coroutine(self, *args: Any, **kwargs: Any) -> asyncio.Future[None]:
        return self._answer("last word")


class Ending(RayhiveGradientAverager):
    """An averager that shuts down, in the state in which its process would be."""

    async def end(self) -> None:
        self._state_updated = asyncio.Event()
        self._matchmaking = SimpleNamespace(  # type: ignore[assignment]
            group_key_manager=SimpleNamespace(prefix="run"), lock_looking_for_group=asyncio.Lock()
        )
        self._p2p = SimpleNamespace(shutdown=self._change_for_a_while)
        self.declaring = asyncio.create_task(self._declare_for_download_periodically())
        await settle()
        await self._shutdown(1.0)

    async def _change_for_a_while(self) -> None:
        for _ in range(3):  # the averager is still announced for a moment
            self._state_updated.set()
            await settle()

    async def remove_p2p_handlers(self, *args: Any, **kwargs: Any) -> None:
        await settle()


class EndingWithState(Ending):
    """The same, of a kind whose state other peers load."""

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        return super().load_state_from_peers(wait, timeout)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_download, "DECLARE_PAUSE_S", 0.0)
    monkeypatch.setattr(state_download, "ROUND_PAUSE_S", 0.0)


@pytest.mark.usefixtures("without_pauses")
def test_an_ended_averager_sends_nothing_to_the_dht() -> None:
    """It could not be read once the averager's process is gone, and would stop the DHT."""
    dht = Answers()
    averager = unstarted(EndingWithState, SHAPES, dht=dht)
    asyncio.run(averager.end())
    assert dht.said == ["store 0.0", "last word"]
    assert averager.declaring.cancelled()


@pytest.mark.usefixtures("without_pauses")
def test_a_state_that_no_peer_loads_is_not_declared() -> None:
    dht = Answers()
    asyncio.run(unstarted(Ending, SHAPES, dht=dht).end())
    assert dht.said == ["last word"]


@pytest.mark.usefixtures("without_pauses")
def test_a_state_is_declared_when_it_changes_and_retracted_once() -> None:
    async def body() -> None:
        dht, priority, changed = Answers(), [3.0], asyncio.Event()
        declaring = asyncio.create_task(
            state_download.declare_state(dht, "key", lambda: priority[0], changed, 100.0)
        )
        for value in (3.0, 4.0, None, None, 5.0):
            priority[0] = value
            changed.set()
            await settle()
        declaring.cancel()
        assert dht.said == ["store 3.0", "store 4.0", "store None", "store 5.0"]

    asyncio.run(body())


def test_a_new_round_is_declared_later_than_the_first_and_than_the_begin_or_end_of_sharing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_download, "DECLARE_PAUSE_S", 0.0)
    monkeypatch.setattr(state_download, "ROUND_PAUSE_S", 1e6)

    async def body() -> None:
        dht, priority, changed = Answers(), [0.0], asyncio.Event()
        declaring = asyncio.create_task(
            state_download.declare_state(dht, "key", lambda: priority[0], changed, 2e6)
        )
        for value in (0.0, 3.0, 4.0, 5.0, None, 6.0):
            priority[0] = value
            changed.set()
            await settle()
        declaring.cancel()
        assert dht.said == ["store 0.0", "store 3.0", "store None", "store 6.0"]

    asyncio.run(body())


def test_a_new_round_is_declared_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_download, "DECLARE_PAUSE_S", 0.0)
    monkeypatch.setattr(state_download, "ROUND_PAUSE_S", 0.0)
    monkeypatch.setattr(state_download, "LOOK_S", 0.001)

    async def body() -> None:
        dht, priority = Answers(), [3.0]
        declaring = asyncio.create_task(
            state_download.declare_state(dht, "key", lambda: priority[0], asyncio.Event(), 1e6)
        )
        for value in (3.0, 4.0):
            priority[0] = value
            while dht.said[-1:] != [f"store {value}"]:
                await asyncio.sleep(0.001)
        declaring.cancel()
        assert dht.said == ["store 3.0", "store 4.0"]

    asyncio.run(body())


def test_the_process_is_told_when_a_state_begins_or_ends_to_be_trained_not_of_each_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    averager, sent = unstarted(EndingWithState, SHAPES), []
    monkeypatch.setattr(averager, "_outer_pipe", SimpleNamespace(send=sent.append))
    for round_, messages in ((3, 1), (4, 1), (5, 1), (0, 2), (0, 2), (6, 3)):
        averager.state_sharing_priority = round_
        assert (averager.state_sharing_priority, len(sent)) == (round_, messages)


def test_a_lost_member_of_the_group_gets_a_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is back, which this peer does not know yet, and would wait for its parts."""
    sent, ran = [], []

    async def run(*args: Any, **kwargs: Any) -> None:
        ran.append((args[3], kwargs["absent"]))

    async def body() -> None:
        for lost in (frozenset(), frozenset({OTHER.to_bytes()})):
            await averager.groups.set_absent(lost)
            group = GroupInfo(b"group", (PEER, OTHER), (b"", b""))
            await averager.run_allreduce([], group, b"group")
            await averager.run_allreduce([], group, b"groupQ")

    monkeypatch.setattr(MeasuredAverager, "_run_allreduce_inplace_", run)
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    averager.cancellations = SimpleNamespace(send=lambda *what: sent.append(what))
    asyncio.run(body())
    lost = frozenset({OTHER.to_bytes()})
    none = frozenset()
    assert ran == [(b"group", none), (b"groupQ", none), (b"group", lost), (b"groupQ", lost)]
    assert sent[:2] == [([], [b"group"]), ([], [b"groupQ"])]
    assert sent[2:] == [([OTHER], [b"group"]), ([OTHER], [b"groupQ"])]


def test_a_cancellation_reaches_every_peer_for_every_all_reduce() -> None:
    async def body() -> None:
        sent = []

        def stub_of(peer: Any) -> Any:
            async def rpc_aggregate_part(stream: Any) -> Any:
                sent.extend([(peer, m.group_id, m.code) async for m in stream])
                return stream_of(averaging_pb2.AveragingData())

            return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

        Cancellations(stub_of).send([OTHER, PEER], [b"P", b"Q"])
        await settle()
        code = averaging_pb2.CANCELLED
        assert sorted(sent) == sorted((p, k, code) for p in (OTHER, PEER) for k in (b"P", b"Q"))

    asyncio.run(body())
