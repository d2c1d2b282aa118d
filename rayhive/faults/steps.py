"""Steps that fault kinds share: acting on several targets at once, polling, listening."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rayhive.errors import RayhiveError
from rayhive.events.event import E
from rayhive.faults.node_tools import ArgsT, StateT, ToolHandle
from rayhive.faults.target import FaultTarget, ProcessRole

#: Polling interval for state on another node, which sends no notification [s].
POLL_S = 0.1
#: Time that the kernel may take to deliver a signal on a busy machine [s].
SETTLE_S = 5.0
States = dict[int, str]
T = TypeVar("T")
ToolT = TypeVar("ToolT", bound=ToolHandle[Any, Any])


async def for_each(names: Iterable[str], step: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Take a step for every name at once, and return the results by name."""
    names = list(names)
    return dict(zip(names, await asyncio.gather(*map(step, names)), strict=True))


def require_living(swarm: FaultTarget, targets: Sequence[str]) -> None:
    """Refuse a fault on a replica that has no running incarnation.

    Raises:
        RayhiveError: One of ``targets`` has none.
    """
    living = set(swarm.living())
    missing = [peer for peer in targets if peer not in living]
    if missing:
        raise RayhiveError(f"no process of {', '.join(missing)} runs")


async def end_processes(
    swarm: FaultTarget, targets: Sequence[str], signum: int, process: ProcessRole = "group"
) -> dict[str, list[int]]:
    """Send a signal that ends peers, whose losses are expected from then on.

    Returns:
        The pids that the signal was delivered to, by replica.

    Raises:
        RayhiveError: One of ``targets`` has no running incarnation.
    """
    require_living(swarm, targets)
    for peer in targets:
        swarm.expect_loss(peer)
    return await for_each(targets, lambda peer: swarm.signal(peer, signum, process))


async def poll(read: Callable[[], Awaitable[T]], reached: Callable[[T], bool], timeout: float) -> T:
    """Read a state until ``reached`` accepts it or ``timeout`` seconds are over.

    Returns:
        The last state, which ``reached`` may not accept.
    """
    deadline = time.monotonic() + timeout
    while True:
        state = await read()
        if reached(state) or time.monotonic() >= deadline:
            return state
        await asyncio.sleep(POLL_S)


async def wait_for_states(
    swarm: FaultTarget,
    peer: str,
    reached: Callable[[States], bool],
    timeout: float,
    process: ProcessRole = "group",
) -> States:
    """Poll the states of a peer's processes; see :func:`poll`."""
    return await poll(lambda: swarm.process_states(peer, process), reached, timeout)


def all_are(state: str, pids: Sequence[int] = ()) -> Callable[[States], bool]:
    """Return a test that every process, the given ``pids`` among them, is in ``state``.

    A process that is not listed is gone: all that run are listed, and those that ended only if they
    were recorded before. A process that started after the last record is not.
    """

    def reached(states: States) -> bool:
        known = set(states) | set(pids)
        return bool(known) and all(states.get(pid, "gone") == state for pid in known)

    return reached


class Listening(Generic[E]):
    """Waits for an event that may have come between the injection and the proof.

    Args:
        swarm: The swarm.
        record: Kind of the event.
        targets: Replicas, each of which is expected to send one after now.
    """

    def __init__(self, swarm: FaultTarget, record: type[E], targets: Sequence[str]) -> None:
        self._swarm, self._record = swarm, record
        self._before = {peer: swarm.last(record, peer) for peer in targets}

    async def heard(self, peer: str, timeout: float) -> E | None:
        """Return the replica's first event since then, or None after ``timeout`` seconds."""
        last = self._swarm.last(self._record, peer)
        if last is not None and last != self._before[peer]:
            return last
        return await self._swarm.event(self._record, peer, timeout)


async def leader_of(swarm: FaultTarget, peer: str) -> str:
    """Return the pid of a living peer's trainer, as the subject of a node tool.

    Raises:
        RayhiveError: No such process runs.
    """
    states = await swarm.process_states(peer, "trainer")
    for pid, state in states.items():
        if state != "gone":
            return str(pid)
    raise RayhiveError(f"no trainer process of {peer} runs")


async def failures(
    tools: Mapping[str, ToolT], step: Callable[[ToolT], Awaitable[object]]
) -> dict[str, str]:
    """Take a step with every tool; return the reason of each for which it fails."""
    failed = {}
    for name, tool in tools.items():
        try:
            await step(tool)
        except (RayhiveError, asyncio.TimeoutError) as error:
            failed[name] = str(error) or "no answer"
    return failed


async def stop_each(
    swarm: FaultTarget, tools: dict[str, ToolHandle[ArgsT, StateT]], nodes: Iterable[str]
) -> dict[str, StateT | None]:
    """Stop tools by the name of their node, and forget them; return their last states.

    The end of a node has already undone the effect of its tools; their states are None.

    Raises:
        ClusterError: A tool cannot be stopped; it and those after it are kept.
    """
    states: dict[str, StateT | None] = {}
    for node in nodes:
        states[node] = await tools[node].stop() if await swarm.answers(node) else None
        del tools[node]
    return states


async def stop_all(tools: dict[str, ToolHandle[Any, Any]]) -> dict[str, str]:
    """Stop tools by the name of their target, and forget them; see :func:`failures`.

    The end of an agent or a node has already undone the effect of its tools.
    """
    failed = await failures(tools, ToolHandle.stop)
    tools.clear()
    return failed
