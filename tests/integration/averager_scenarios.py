"""Scenarios between real averagers; each function runs in a process of its own.

Every peer has a DHT and a p2pd. ``python -m tests.integration.averager_scenarios NAME ARGS``
prints the result of the function.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import multiprocessing
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import hivemind
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.grad_averager import GradientAverager
from hivemind.proto import averaging_pb2

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.steps import do_nothing
from rayhive.compression.codecs.base import made
from tests.integration.averager_groups import (
    NEVER,
    PATIENT,
    averagers,
    mean_gradients,
    one_round,
    spread,
    swarm,
    tell,
    worst_error,
)
from tests.integration.averager_harness import MARK
from tests.integration.departure_scenarios import departed_member


def bytes_of_rounds(peers: int, cases: list[dict[str, Any]], rounds: int = 2) -> Any:
    """Run some rounds for each case; return the measurements of every peer."""
    report = []
    with swarm(peers) as dhts:
        for number, case in enumerate(cases):
            codec = made(case["codec"], case.get("top_k"))
            options: dict[str, Any] = {"prefix": f"case{number}"}
            make: Any = RayhiveGradientAverager
            if case.get("powersgd_rank") is not None:
                make = RayhivePowerSGDAverager
                options["averager_rank"] = case["powersgd_rank"]
                options["min_compression_ratio"] = case["min_compression_ratio"]
            options["compression"] = codec.build(case.get("threshold"))
            options["error_feedback"] = case.get("error_feedback", False)
            with averagers(dhts, make, **options) as group:
                expected = mean_gradients(group)
                measured = [[r.summary() for r in one_round(group)] for _ in range(rounds)]
                report.append(
                    {
                        "rounds": measured,
                        "error": worst_error(group[0], expected),
                        "spread": spread(group),
                        "compressed": list(getattr(group[0].payload, "compressed", [])),
                    }
                )
    return report


class Mute(RayhiveGradientAverager):
    """Averager that joins a group and then neither sends nor reduces."""

    async def run_allreduce(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()


def partial_round(dhts: Sequence[hivemind.DHT]) -> Any:
    """Run one round of three peers of which one keeps silent."""
    options = {"prefix": "partial", "target_group_size": 3}
    limits = {"sender_timeout": 0.5, "reducer_timeout": 2.0}
    with (
        averagers(dhts[2:], Mute, **options) as mute,
        averagers(dhts[:2], RayhiveGradientAverager, **options, **limits) as talking,
    ):
        for averager in mute:
            averager.step(wait=False, timeout=NEVER + 30)
        results = one_round(talking)
    return {"rounds": [r.summary() for r in results], "mute": str(dhts[2].peer_id)}


class Failing(RayhiveGradientAverager):
    """Averager that fails in its rounds: before it sends anything, or before it answers."""

    def __init__(self, *args: Any, sends: bool, **kwargs: Any) -> None:
        self._sends, self._failed = sends, asyncio.Event()
        super().__init__(*args, **kwargs)

    async def run_allreduce(
        self, tensors: Sequence[torch.Tensor], group: GroupInfo, key: bytes, **options: Any
    ) -> None:
        sending = asyncio.ensure_future(super().run_allreduce(tensors, group, key, **options))
        try:
            while self._sends and not (await self.groups.running[key]).sent_bytes:
                await asyncio.sleep(0.01)
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            self._failed.set()
        raise AllreduceException("failed")

    async def aggregate(self, stream: Any, context: Any) -> AsyncGenerator[Any, None]:
        await self._failed.wait()
        async for message in super().aggregate(stream, context):
            yield message


def failed_round(dhts: Sequence[hivemind.DHT]) -> Any:
    """Run rounds of three peers of which one fails; no timeout of the others ends in time."""
    report: dict[str, Any] = {"failing": str(dhts[2].peer_id)}
    for how, sends in (("before it sends", False), ("before it answers", True)):
        options = {"prefix": f"fail{sends:d}"}
        with (
            averagers(dhts[2:], Failing, sends=sends, **options) as failing,
            averagers(dhts[:2], RayhiveGradientAverager, **options, **PATIENT) as others,
        ):
            tell([*others, *failing], [*others, *failing])
            failing[0].accumulate_grads_(batch_size=1)
            failing[0].step(wait=False, timeout=NEVER + 30, gather=1, allow_retries=False)
            report[how] = [result.summary() for result in one_round(others, gather=1)]
    return report


class Stumbling(RayhivePowerSGDAverager):
    """Averager whose first round fails after all parts were sent."""

    stumbled = False

    async def run_allreduce(self, *args: Any, **kwargs: Any) -> None:
        await super().run_allreduce(*args, **kwargs)
        if args[2].endswith(b"PHASE_Q") and not self.stumbled:
            self.stumbled = True
            raise AllreduceException("stumbled")


def retried_round(dhts: Sequence[hivemind.DHT]) -> Any:
    """Let the first attempt at a round fail for both peers, then average once more."""
    options = {"averager_rank": 2, "min_compression_ratio": 0.3}
    with averagers(dhts[:2], Stumbling, prefix="retry", target_group_size=2, **options) as group:
        return [[r.summary() for r in one_round(group)] for _ in range(2)]


def growing_group(dhts: Sequence[hivemind.DHT]) -> Any:
    """Average with two peers, then with a third; the window never ends."""
    options = {"prefix": "grow"}
    with averagers(dhts[:2], RayhiveGradientAverager, **options) as first:
        tell(first, first)
        before = one_round(first, gather=1)
        with averagers(dhts[2:], RayhiveGradientAverager, **options) as late:
            together = (*first, *late)
            tell(together, together)
            after = one_round(together, gather=2)
    return [[r.summary() for r in results] for results in (before, after)]


class Watched(RayhiveGradientAverager):
    """Averager that signals in shared memory that a peer follows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.followed = multiprocessing.Event()
        super().__init__(*args, **kwargs)

    async def lead(
        self, request: averaging_pb2.JoinRequest, context: Any
    ) -> AsyncGenerator[Any, None]:
        async for message in super().lead(request, context):
            if message.code == averaging_pb2.ACCEPTED:
                self.followed.set()
            yield message


def shrinking_group(dhts: Sequence[hivemind.DHT]) -> Any:
    """Let two peers wait for a third that never comes, then remove it from the members."""
    absent = SimpleNamespace(dht=dhts[2])
    with averagers(dhts[:2], Watched, prefix="shrink") as group:
        tell(group, [*group, absent])
        for averager in group:
            averager.accumulate_grads_(batch_size=1)
        controls = [averager.step(wait=False, timeout=NEVER + 30, gather=1) for averager in group]
        assert group[0].followed.wait(30), "the oldest peer leads"
        too_early = [control.done() for control in controls]
        tell(group, group)
        sizes = [control.result(40).group_size for control in controls]
        tell(group, group[:1])
        lonely = group[0].step(wait=False, timeout=NEVER + 30, gather=2).exception(20)
    return {"too_early": too_early, "sizes": sizes, "alone": type(lonely).__name__}


def state_averaging(dhts: Sequence[hivemind.DHT]) -> Any:
    """Average parameters, download a state, then use averagers whose processes are gone."""

    def make(parameters: Any, **options: Any) -> Any:
        return RayhiveStateAverager(
            optimizer=torch.optim.SGD(parameters, lr=0.1), initialize_optimizer=False, **options
        )

    with averagers(dhts[:2], make, prefix="state", target_group_size=2) as group:
        rounds = [averager.schedule_step(timeout=NEVER + 30) for averager in group]
        for averager, round_ in zip(group, rounds, strict=True):
            averager.step(averaging_round=True, delay_averaging=True, averaging_control=round_)
        for averager in group:
            averager.step(wait_for_delayed_updates=True)
        results = [round_.result(20).summary() for round_ in rounds]
        with torch.no_grad():
            for parameter in group[0].main_parameters:
                parameter.normal_()
        group[0].local_epoch = 3
        served: list[threading.Event] = []

        def watch(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            for tensor in tensors:
                served.append(threading.Event())
                weakref.finalize(tensor.untyped_storage(), served[-1].set)
            return tensors

        group[0].on_serving = watch
        group[1].load_state_from_peers(timeout=20)
        freed = [gone.wait(10) for gone in served]
        pairs = zip(group[0].main_parameters, group[1].main_parameters, strict=True)
        loaded = group[1].local_epoch == 3 and all(torch.equal(a, b) for a, b in pairs)
    tell(group, group)
    alive = [averager.is_alive() for averager in group]
    return {"rounds": results, "alive": alive, "loaded": loaded, "freed": freed}


def shutdown_while_searching(_: Sequence[hivemind.DHT]) -> Any:
    """Shut an averager down that looks for peers that do not exist."""
    with swarm(1) as dhts:
        with averagers(dhts, RayhiveGradientAverager, prefix="alone", target_group_size=2) as group:
            group[0].accumulate_grads_(batch_size=1)
            control = group[0].step(wait=False, timeout=NEVER + 30)
        try:
            ended = repr(control.result(20))
        except concurrent.futures.CancelledError:
            ended = "cancelled"
    return {
        "ended": ended,
        "exit codes": [group[0].exitcode, dhts[0].exitcode],
    }


class Plain(GradientAverager):
    """hivemind's averager, which would leave a socket file and may crash its DHT at the end."""

    async def _shutdown(self, timeout: float | None) -> None:
        await super()._shutdown(timeout)
        await self.dht.run_coroutine(do_nothing, return_future=True)
        await self._p2p.shutdown()


Plain.__name__ = GradientAverager.__name__  # its RPCs carry it


def plain_peer(dhts: Sequence[hivemind.DHT]) -> Any:
    """Average with a peer that runs hivemind's own class."""
    options = {"prefix": "mixed", "min_matchmaking_time": 2.0, "target_group_size": 2}
    with (
        averagers(dhts[:1], RayhiveGradientAverager, **options) as ours,
        averagers(dhts[1:2], Plain, **options, request_timeout=1.0) as theirs,
    ):
        expected = mean_gradients((*ours, *theirs))
        results = one_round((*ours, *theirs))
        return {
            "sizes": [len(result) for result in results],
            "error": worst_error(theirs[0], expected),
            "ours": results[0].summary(),
        }


def rounds_of_averagers() -> Any:
    """Run the scenarios of one swarm one after the other; a failed one reports its error."""
    report: dict[str, Any] = {}
    with swarm(3) as dhts:
        for scenario in (
            partial_round,
            failed_round,
            departed_member,
            retried_round,
            growing_group,
            shrinking_group,
            state_averaging,
            shutdown_while_searching,
            plain_peer,
        ):
            try:
                report[scenario.__name__] = scenario(dhts)
            except Exception:
                report[scenario.__name__] = {"failure": traceback.format_exc()}
    return report


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(MARK + json.dumps(globals()[name](**arguments)), flush=True)


if __name__ == "__main__":
    main()
