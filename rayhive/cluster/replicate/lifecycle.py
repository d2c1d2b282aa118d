"""The course of one replicate, from its placement to its last event."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayhive.cluster.node import machine
from rayhive.cluster.node.forkserver_manager import tail
from rayhive.cluster.replicate.fault_target import SwarmTarget
from rayhive.cluster.replicate.log import ReplicateLog
from rayhive.cluster.replicate.nemesis import LATE_S, Nemesis
from rayhive.cluster.replicate.peer_actor import EXITED
from rayhive.cluster.replicate.peer_table import Outcome, PeerTable
from rayhive.cluster.replicate.swarm import Started, Swarm
from rayhive.cluster.replicate.timeouts import PhaseTimeouts
from rayhive.errors import RayhiveError
from rayhive.events import Event, make_event, read_events
from rayhive.invariants import InvariantResult, check_all
from rayhive.spec.replicate import LONGEST, PeerSpec, ReplicateSpec


class _Ended(Exception):
    """Leaves the course of the replicate with its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Replicate:
    """Runs one replicate and writes down what happens.

    Args:
        spec: The replicate.
        timing: Bounds of its phases.
        agent_options: Arguments of the agents that have to be made.
    """

    def __init__(
        self, spec: ReplicateSpec, timing: PhaseTimeouts, agent_options: Mapping[str, Any]
    ) -> None:
        self.outcome: Outcome | None = None
        self._spec = spec
        self._timing = timing
        self._swarm = Swarm(spec, agent_options, self._heard, timing.unreachable)
        self._peer_table = PeerTable(self._swarm.names)
        self._phase = "placing"
        self._created = time.monotonic()
        self._released: float | None = None
        self._told_to_go = False
        self._stopped: str | None = None
        self._out_of_time = False
        self._news = asyncio.Event()
        self._log = ReplicateLog(spec, self._news.set)
        self._target: SwarmTarget | None = None
        self._clock: Nemesis | None = None

    async def run(self) -> None:
        """Run to the end. Whatever happens, there is an outcome afterwards, and it is on disk."""
        try:
            self._log.open()
            outcome = await self._course()
        except _Ended as ended:
            outcome = ended.outcome
        except RayhiveError as error:  # peers report their own failures as events
            outcome = Outcome("lost", str(error))
        except Exception as error:
            self._log.note_failure()
            outcome = Outcome("lost", f"the supervisor failed: {error!r}")
        outcome = self._valid(outcome)
        if outcome.state not in ("stopped", "lost"):
            # what was measured counts, even if this process dies while it clears up
            self._emit("outcome", **outcome.as_dict())
            self._log.sync()
        try:
            self._check(await self._end(outcome))
        except Exception:
            self._log.note_failure()
        self._emit("replicate_finished", **outcome.as_dict())
        self._log.close()
        self._phase = "finished"
        broken = self._log.error
        self.outcome = outcome if broken is None else Outcome("lost", broken)

    def stop(self, reason: str) -> None:
        """Ask for an early end."""
        if self._stopped is None:
            self._stopped = reason
            self._news.set()

    def status(self) -> dict[str, Any]:
        """Return phase, times and peers."""
        now = time.monotonic()
        return {
            "run_id": self._spec.run_id,
            "study": self._spec.study,
            "folder": self._spec.folder,
            "phase": self._phase,
            "seconds": now - (self._created if self._released is None else self._released),
            "budget_seconds": self._spec.budget.seconds_per_replicate,
            "outcome": None if self.outcome is None else self.outcome.as_dict(),
            "peers": {name: peer.status() for name, peer in self._peer_table.peers.items()},
        }

    async def _course(self) -> Outcome:
        spec, timing, swarm, peer_table = self._spec, self._timing, self._swarm, self._peer_table
        self._emit(
            "replicate_started",
            spec=spec.model_dump(mode="json", by_alias=True),
            versions=machine.versions(),
            hardware=machine.hardware(),
        )
        await self._unless_stopped(swarm.place(timing.placement))
        if spec.plan is not None and spec.plan.faults:
            self._target = SwarmTarget(spec, swarm, peer_table, self._spawned, self._log.append)
            self._clock = Nemesis(spec.plan, self._target, self._news.set)
        self._phase = "starting"
        startup = time.monotonic() + timing.startup
        spawned = self._spawned(None)
        await self._unless_stopped(asyncio.wait_for(swarm.spawn(spawned), timing.startup))

        first, *others = swarm.names
        await swarm.command([first], "start", initial_peers=[])
        await self._until(
            lambda: bool(peer_table.peers[first].addresses),
            startup,
            f"its DHT within {timing.startup:g} s (timeouts.starting)",
        )
        barrier = time.monotonic() + timing.barrier
        addresses = peer_table.peers[first].addresses
        await swarm.command(others, "start", initial_peers=addresses)
        await self._until(
            peer_table.all_ready,
            barrier,
            f"the barrier within {timing.barrier:g} s (timeouts.barrier)",
        )
        if self._clock is not None:
            await self._unless_stopped(self._clock.setup())

        await self._count_links("start")
        self._released = time.monotonic()
        self._phase = "training"
        self._emit("barrier_released", peers=len(swarm.names))
        await swarm.command(swarm.names, "train")
        if self._clock is not None:
            self._clock.start()
        await self._train(self._released + spec.budget.seconds_per_replicate)
        await self._count_links("end")
        return peer_table.outcome(spec.budget, self._out_of_time, self._stopped)

    async def _count_links(self, when: str) -> None:
        counted = await self._swarm.link_counters()
        if counted:
            self._emit("link_counted", when=when, nodes=counted)

    async def _train(self, deadline: float) -> None:
        """Return when every peer has finished, by itself or because it was told to."""
        peer_table, patience = self._peer_table, self._patience()

        def ended() -> object:
            return self._trouble() or peer_table.first_finish() or self._stopped

        over = await self._wait(ended, deadline)
        if not over and self._clock is not None:
            over = await self._follow_faults(self._clock, ended, deadline)
        if self._clock is not None:
            await self._clock.close()  # nobody can end while it is stopped or cut off
        await self._raise_trouble()
        reason = peer_table.first_finish()
        if self._stopped is None and over and reason == "rounds":
            # The others are in the same round: they end by themselves unless they hang.
            until = min(deadline, time.monotonic() + patience)
            await self._wait(
                lambda: self._trouble() or peer_table.all_finished() or self._stopped, until
            )
            await self._raise_trouble()
        if peer_table.all_finished():
            return
        self._out_of_time = not over
        self._phase = "stopping"
        why = "stop" if self._stopped is not None else reason or "seconds"
        await self._swarm.command(peer_table.running(), "stop", reason=why)
        if self._stopped is not None:
            patience = self._timing.hurry
        await self._wait(
            lambda: self._trouble() or peer_table.all_finished(), time.monotonic() + patience
        )
        if self._stopped is None:
            await self._raise_trouble()
        elif not peer_table.all_finished():
            raise _Ended(Outcome("stopped", self._stopped))
        if not peer_table.all_finished():
            hung = ", ".join(peer_table.missing("finished", "gone"))
            raise _Ended(await self._blamed(f"{hung} did not stop within {patience:g} s"))

    async def _follow_faults(
        self, clock: Nemesis, ended: Callable[[], object], deadline: float
    ) -> bool:
        """Train on past the deadline if faults were late; return whether something ended it."""
        latest = deadline + (LONGEST - 1) * self._spec.budget.seconds_per_replicate
        await self._wait(lambda: ended() or clock.over(), latest)
        over = await self._wait(ended, min(latest, clock.quiet_from(deadline)))
        seconds = time.monotonic() - deadline
        if seconds > LATE_S:
            self._emit("training_extended", seconds=seconds, slip_s=clock.slip_s)
        return over

    def _patience(self) -> float:
        """Return how long a peer may need to stop: it may be in the middle of an averaging."""
        return self._timing.stop + self._spec.swarm.averaging_timeout

    async def _unless_stopped(self, step: Any) -> None:
        """Await ``step``, but give it up when somebody asks for the end of the replicate."""
        task = asyncio.ensure_future(step)
        while not task.done():
            if self._stopped is not None:
                task.cancel()
                raise _Ended(Outcome("stopped", self._stopped))
            news = asyncio.ensure_future(self._news.wait())
            await asyncio.wait({task, news}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            self._news.clear()
        try:
            task.result()
        except asyncio.TimeoutError:
            text = f"the peers did not start within {self._timing.startup:g} s (timeouts.starting)"
            raise _Ended(Outcome("lost", text)) from None

    async def _until(self, reached: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for a step of the startup.

        Raises:
            _Ended: A peer is in trouble, somebody wants to stop, or time is over.
        """
        peer_table = self._peer_table
        done = await self._wait(lambda: reached() or self._trouble() or self._stopped, deadline)
        if self._stopped is not None:
            raise _Ended(Outcome("stopped", self._stopped))
        await self._raise_trouble()
        if not done:
            late = ", ".join(peer_table.missing("ready"))
            raise _Ended(Outcome("lost", f"{late} did not reach {what}"))

    def _trouble(self) -> str | None:
        return self._log.error or self._peer_table.trouble()

    async def _raise_trouble(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            raise _Ended(await self._blamed(trouble))

    async def _blamed(self, trouble: str) -> Outcome:
        """Return the outcome of a replicate that went wrong.

        It is ``lost`` if a disk, an actor or a node is why, and else the configuration's own
        failure. A node that goes takes its peers along before anybody knows: all of them are
        asked.
        """
        if self._log.error is not None or self._peer_table.uprooted():
            return Outcome("lost", trouble)
        gone = await self._swarm.silent_nodes(self._peer_table.undoomed())
        if not gone:
            return Outcome("failed", trouble)
        nodes = "; ".join(f"node {node[:8]} does not answer ({why})" for node, why in gone.items())
        return Outcome("lost", f"{nodes}; {trouble}")

    async def _wait(self, condition: Callable[[], object], deadline: float) -> bool:
        """Return whether ``condition`` came true before ``deadline`` (of the monotonic clock)."""
        while not condition():
            self._news.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                return bool(condition())
        return True

    def _check(self, left: list[str]) -> None:
        """Write down which invariants held.

        Args:
            left: What is left of the replicate on the nodes.
        """
        if self._released is None:
            return
        results = check_all(self._spec, list(read_events(self._log.path)))
        nodes = len({peer.host for peer in self._peer_table.peers.values()})
        for found in (*results, InvariantResult("no_orphans", not left, nodes, tuple(left))):
            self._emit("invariant", **dataclasses.asdict(found))

    async def _end(self, outcome: Outcome) -> list[str]:
        """Send the peers home and see that they are gone; return what is left of them."""
        self._phase = "stopping"
        swarm, peer_table = self._swarm, self._peer_table
        if self._clock is not None:
            await self._clock.close()
        self._told_to_go = True
        patience = self._timing.shutdown
        if outcome.state in ("failed", "stopped", "lost"):
            # Before the barrier peers wait for other commands, and there is nothing to save.
            patience = self._timing.hurry if self._released is not None else 0.0
            await swarm.command(peer_table.running(), "stop", reason=outcome.state)
        await swarm.kill(peer_table.beginners())  # they wait for another command
        await swarm.command(list(peer_table.peers), "shutdown")
        running = [name for name, peer in peer_table.peers.items() if peer.pid is not None]
        await self._wait(
            lambda: all(peer_table.peers[name].exited for name in running),
            time.monotonic() + patience,
        )
        await swarm.kill([name for name in running if not peer_table.peers[name].exited])
        return await swarm.clear()

    def _spawned(self, cause: str | None) -> Started:
        """Return what takes a peer that was started on behalf of a fault, or with the others."""

        def started(peer: PeerSpec, answer: Mapping[str, Any]) -> None:
            self._peer_table.spawned(peer.name, int(answer["pid"]), str(answer["host"]))
            place = {key: answer[key] for key in ("node", "host", "pid")}
            told = {"slot": peer.slot, "life": peer.life, "cause": cause}
            self._emit("peer_spawned", peer.name, **place, **told)

        return started

    def _valid(self, outcome: Outcome) -> Outcome:
        """Return the outcome, unless the replicate does not stand for its scenario."""
        if self._clock is None or outcome.state not in ("completed", "timed_out"):
            return outcome
        problem = self._clock.problem()
        return outcome if problem is None else Outcome("invalid", problem)

    async def _heard(self, name: str, event: Event) -> None:
        if event["kind"] == EXITED:
            self._peer_exited(name, event.get("exit_code"), event.get("reason"))
        else:
            self._log.append({**event, "peer": name})
            try:
                self._peer_table.take(name, event)
            except (KeyError, TypeError, ValueError) as error:
                self._peer_table.lost(
                    name, f"it sent a {event['kind']} that can't be read: {error!r}"
                )
            if self._target is not None:
                self._target.heard(name, event)
            if self._clock is not None and event["kind"] in ("transition", "training_started"):
                self._clock.heard(int(event.get("round", 0)))
        self._news.set()

    def _peer_exited(self, name: str, code: int | None, reason: str | None) -> None:
        if self._told_to_go or self._peer_table.peers[name].finish_reason is not None:
            self._peer_table.left(name)
            return
        text = reason or _describe_exit(code)
        known = self._peer_table.peers[name].error
        end = tail(self._swarm.log_of(name), 6)
        # only the loss of its actor has a reason of its own
        self._peer_table.lost(
            name, f"{text}; its log ends with: {end}", uprooted=reason is not None
        )
        self._emit("peer_lost", name, exit_code=code, reason=known or text)

    def _emit(self, kind: str, peer: str | None = None, **fields: Any) -> None:
        event = make_event(kind, peer, **fields)
        self._log.append(event)
        if self._target is not None and peer is not None:
            self._target.heard(peer, event)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "its process ended"
    if code < 0:
        return f"its process was killed by signal {-code}"
    return f"its process ended with exit code {code}"
