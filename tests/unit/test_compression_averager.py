"""Settings and names of the averagers, without a swarm."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from rayhive.averaging.averagers import (
    RayhiveGradientAverager,
    RayhivePowerSGDAverager,
    RayhiveStateAverager,
)
from rayhive.averaging.matchmaking import LiveMatchmaking, StepTrace
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.step_history import RecordedSteps
from rayhive.compression.counting import CountingCompression
from tests.unit.compression_fakes import OTHER, PEER, settle, unstarted

SHAPES = [(4, 3)]
PAIRS = [
    (RayhiveGradientAverager, GradientAverager),
    (RayhivePowerSGDAverager, PowerSGDGradientAverager),
    (RayhiveStateAverager, TrainingStateAverager),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_rpcs_have_hiveminds_names(ours: Any, theirs: Any) -> None:
    """Also when hivemind's class was asked first: a class inherits its parent's stubs."""
    theirs._collect_rpc_handlers()
    ours._collect_rpc_handlers()
    names = [{handler.method_name for handler in kind._rpc_handlers} for kind in (ours, theirs)]
    assert names[0] == names[1]
    for name in names[0]:
        for prefix in ("run", None):
            assert ours._get_handle_name(prefix, name) == theirs._get_handle_name(prefix, name)
    assert ours._stub_type is not theirs._stub_type
    kinds = [
        {h.method_name: (h.request_type, h.response_type) for h in kind._rpc_handlers}
        for kind in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_classes_pickle_as_themselves(ours: Any, theirs: Any) -> None:
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert issubclass(ours, theirs)


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
def test_timeouts_follow_their_own_purpose(
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
    assert trace.waited() == 0.0, "nobody wanted the round yet"
    for triggered, waited in ((9.0, 5.0), (12.0, 3.0), (20.5, 0.5), (30.0, 0.0)):
        trace.triggered = triggered
        assert trace.waited() == waited


def test_steps_are_told_once_when_they_ended() -> None:
    class Recorder(RecordedSteps):
        def __init__(self) -> None:
            self._steps, self._outcomes = deque(), deque()

        def __del__(self) -> None:
            pass

    recorder = Recorder()
    done, failed, cancelled, running = (Future() for _ in range(4))
    done.set_result(RoundResult({PEER: 1}))
    failed.set_exception(TimeoutError("too late"))
    cancelled.cancel()
    recorder._steps.extend((done, failed, cancelled, running))
    told = recorder.take_rounds()
    assert [result.error for result in told] == [None, "TimeoutError('too late')"]
    assert recorder.take_rounds() == []
    running.set_result(RoundResult())
    assert len(recorder.take_rounds()) == 1
    with pytest.raises(ValueError, match="trigger"):
        recorder.step(require_trigger=True)


def test_downloads_end_with_a_message_that_says_so() -> None:
    """Plain peers append it as an empty chunk; ours hang up on it."""

    async def body() -> None:
        averager = unstarted(RayhiveGradientAverager, [(4, 3), (2,)])

        async def state() -> Any:
            return b"metadata", averager._averaged_tensors, None

        averager._get_current_state_from_host_process = state
        stream = averager.rpc_download_state(None, SimpleNamespace(remote_id=OTHER))
        messages = [await stream.__anext__() for _ in range(3)]
        assert [bool(message.ByteSize()) for message in messages] == [True, True, False]
        ending = asyncio.create_task(stream.__anext__())
        await settle()
        assert not ending.done()
        ending.cancel()

    asyncio.run(body())


def test_counting_is_exact_across_threads_and_forks() -> None:
    counting = CountingCompression(NoCompression())
    tensor = torch.zeros(25)
    info = CompressionInfo.from_tensor(tensor)

    def work() -> None:
        for _ in range(50):
            counting.compress(tensor, info)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.take() == (200 * 100, 200)
    assert counting.take() == (0, 0)
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert counting.take() == (50 * 100, 50)
    assert torch.equal(counting.extract(counting.compress(tensor, info)), tensor)
    assert counting.estimate_compression_ratio(info) == 1.0
    assert counting.compression_type == NoCompression.compression_type


def test_nothing_is_said_to_the_dht_after_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be read once the averager's process is gone, and would stop the DHT."""
    said: list[str] = []

    def answer(name: str) -> Any:
        def say(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            said.append(name)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future

        return say

    async def end() -> None:
        for _ in range(3):  # the averager is still announced for a moment
            averager._state_updated.set()
            await settle()

    async def body() -> None:
        averager._state_updated = asyncio.Event()
        declaring = asyncio.create_task(averager._declare_for_download_periodically())
        await settle()
        assert said == ["store"]
        averager._state_updated.set()
        await settle()
        assert said == ["store", "store"]
        await averager._shutdown(1.0)
        assert said[2:] == ["last word"]
        assert declaring.cancelled()

    monkeypatch.setattr("rayhive.averaging.averager.DECLARE_PAUSE_S", 0.0)
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    averager.dht.store, averager.dht.run_coroutine = answer("store"), answer("last word")
    averager._matchmaking = SimpleNamespace(
        group_key_manager=SimpleNamespace(prefix="run"), lock_looking_for_group=asyncio.Lock()
    )
    averager._p2p = SimpleNamespace(shutdown=end)
    monkeypatch.setattr(RayhiveGradientAverager, "remove_p2p_handlers", lambda *a, **k: settle())
    asyncio.run(body())


def test_who_was_lost_and_is_in_the_group_hears_that_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is back, which this peer does not know yet, and would wait for its parts."""
    told, ran = [], []

    async def run(*args: Any, **kwargs: Any) -> None:
        ran.append((args[3], kwargs["absent"]))

    async def tell(peer: Any, allreduce_ids: list[bytes]) -> None:
        told.append((peer, allreduce_ids))

    async def body() -> None:
        for lost in (frozenset(), frozenset({OTHER.to_bytes()})):
            averager._lost = lost
            group = GroupInfo(b"group", (PEER, OTHER), (b"", b""))
            await averager._run_allreduce_inplace_([], group)
            await averager._run_allreduce_inplace_([], group, b"groupQ")
            await settle()

    monkeypatch.setattr(DecentralizedAverager, "_run_allreduce_inplace_", run)
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    averager._tell_of_leave = tell
    asyncio.run(body())
    lost = frozenset({OTHER.to_bytes()})
    assert ran == [(None, frozenset()), (b"groupQ", frozenset()), (None, lost), (b"groupQ", lost)]
    assert told == [(OTHER, [b"group"]), (OTHER, [b"groupQ"])]
