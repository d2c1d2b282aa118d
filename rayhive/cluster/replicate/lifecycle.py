"""The course of one replicate, from its placement to its last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

import ray

from rayhive import events
from rayhive.cluster import actors
from rayhive.cluster.live_metrics import ReplicateMetrics
from rayhive.cluster.node import machine
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate.early_stop import EarlyStopWatch
from rayhive.cluster.replicate.fault_target import SwarmTarget
from rayhive.cluster.replicate.meeting import Meeting, open_meeting
from rayhive.cluster.replicate.nemesis import LATE_S, Nemesis
from rayhive.cluster.replicate.node_agents import NodeAgents
from rayhive.cluster.replicate.peer_pool import PeerPool
from rayhive.cluster.replicate.peer_table import TARGET, Outcome, PeerTable, ReplicateStatus
from rayhive.cluster.replicate.preemptions import Preemptions
from rayhive.cluster.replicate.recorder import Recorder, ReplicateLog
from rayhive.cluster.replicate.reservation import Reservation
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.cluster.replicate.waiter import StopRequested, Waiter
from rayhive.crash_points import crash_point
from rayhive.errors import RayhiveError
from rayhive.invariants import check_all
from rayhive.metrics.clocks import on_one_clock
from rayhive.spec.commands import Shutdown, Start, Stop, Train
from rayhive.spec.replicate import LONGEST, ReplicateSpec
from rayhive.timeline import Timeline

#: Replaces ``stopping`` and ``teardown`` when the result no longer matters: the replicate failed or
#: was asked to end [s].
_HURRY_S = 3.0


class _Ended(Exception):
    """Leaves the course of the replicate with an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Replicate:
    """Runs one replicate and writes its events.

    Args:
        spec: The replicate.
        agent_options: Settings of an agent that has to be created.
        pool: Idle actors for its peers, and for those of the next replicate.

    Attributes:
        outcome: The outcome; None until it is on disk.
        left_nothing: Whether it has ended in order, and nothing of it remains anywhere.
    """

    def __init__(self, spec: ReplicateSpec, agent_options: AgentOptions, pool: PeerPool) -> None:
        self.outcome: Outcome | None = None
        self.left_nothing = False
        self._spec, self._timeouts = spec, spec.timeouts
        self._phase = "placing"
        self._created = time.monotonic()
        self._released: float | None = None
        self._out_of_time = False
        self._neighbours: list[str] = []
        self._meeting: Meeting | None = None
        self._waiter = Waiter()
        self._log = ReplicateLog(spec, self._waiter.changed)
        self._reservation = Reservation(spec)
        here, patience = ray.get_runtime_context(), spec.timeouts.unreachable
        self._agents = NodeAgents(spec, agent_options, patience, here.get_actor_name() or "")
        self._peer_table = PeerTable.of(spec)
        self._early_stop = EarlyStopWatch(spec, self._peer_table.training, self._waiter.stop)
        self._metrics = ReplicateMetrics(spec)
        self._recorder = Recorder(
            self._log, self._peer_table, self._waiter.changed, self._early_stop, self._metrics
        )
        home = here.get_node_id()
        self._swarm = Swarm(
            spec,
            self._reservation,
            self._agents,
            self._recorder.receive,
            patience,
            home,
            pool,
        )
        self._preemptions = Preemptions(
            spec.preemption,
            self._swarm,
            self._agents,
            self._peer_table,
            self._recorder.write,
            self._waiter.changed,
            home,
        )

    async def run(self) -> None:
        """Run to the end. In every case there is an outcome afterwards, and it is on disk."""
        try:
            self._log.open()
            outcome = await self._course()
        except _Ended as ended:
            outcome = ended.outcome
        except StopRequested as request:
            outcome = Outcome("stopped", str(request))
        except RayhiveError as error:  # peers report their own failures as events
            outcome = Outcome("lost", str(error))
        except Exception as error:
            self._log.note_failure()
            outcome = Outcome("lost", f"the supervisor failed: {error!r}")
        outcome = self._valid(self._early_stop.judged(outcome))
        if outcome.state not in ("stopped", "lost"):
            # the measurement counts, even if this process dies during the clean-up
            self._recorder.write(
                events.OutcomeFound(state=outcome.state, stop_reason=outcome.stop_reason)
            )
            self._log.sync()
            crash_point("outcome_found")
        in_order = False
        try:
            left = await self._shut_down(outcome)
            self._check_invariants(left)
            in_order = not left
        except Exception:
            self._log.note_failure()
        if outcome.state == "lost":
            until = self._preemptions.hold_until
            await self._waiter.until(lambda: self._waiter.stopped, until)
        crash_point("peers_ended")
        self._recorder.write(
            events.ReplicateFinished(state=outcome.state, stop_reason=outcome.stop_reason)
        )
        self._log.close()
        crash_point("end_written")
        self._phase = "finished"
        broken = self._log.error
        self.outcome = outcome if broken is None else Outcome("lost", broken)
        self.left_nothing = in_order and self.outcome.state != "lost"
        self._metrics.end()

    def stop(self, reason: str) -> None:
        """Ask for an early end."""
        self._waiter.stop(reason)

    def status(self) -> ReplicateStatus:
        """Return phase, times and peers."""
        seconds = time.monotonic() - (self._released or self._created)
        status = self._peer_table.status(self._spec, self._phase, seconds, self.outcome)
        return replace(status, stop_requested=self._waiter.stopped is not None)

    def note_neighbours(self, run_ids: Sequence[str]) -> None:
        """Record other replicates on the same nodes, unless the training is over."""
        new = [run_id for run_id in run_ids if run_id not in self._neighbours]
        if new and self._phase in ("placing", "starting", "training"):
            self._neighbours += new
            self._recorder.write(events.NodesShared(replicates=new))

    def _tell_neighbours(self) -> None:
        """Tell the replicates on the same nodes, which cannot know, that this one is there."""
        if neighbours := self._reservation.neighbours():
            for supervisor in actors.supervisors():
                supervisor.beside.remote(neighbours, self._spec.run_id)

    # -- startup -------------------------------------------------------------------------------

    async def _course(self) -> Outcome:
        spec, swarm, recorder = self._spec, self._swarm, self._recorder
        recorder.write(
            events.ReplicateStarted(
                spec=spec.model_dump(mode="json", by_alias=True),
                versions=machine.versions(),
                hardware=machine.hardware(),
                boot=machine.boot_id(),
            )
        )
        crash_point("log_begun")
        await self._start_step(self._reservation.place(spec.timeouts.placing))
        crash_point("room_reserved")
        if not self._reservation.is_alone:
            await asyncio.to_thread(self._tell_neighbours)
        if spec.plan is not None and spec.plan.faults:
            recorder.target = SwarmTarget(
                spec,
                swarm,
                self._agents,
                self._peer_table,
                recorder.spawned,
                self._preemptions.own_drains,
            )
            recorder.nemesis = Nemesis(
                spec.plan, recorder.target, recorder.write, self._waiter.changed
            )
        await self._start_peers()
        if recorder.nemesis is not None:
            await self._start_step(recorder.nemesis.setup())

        if not self._reservation.is_alone:
            self.note_neighbours(await asyncio.to_thread(self._reservation.neighbours))
        crash_point("peers_ready")
        await self._count_links("start")
        self._released = time.monotonic()
        self._phase = "training"
        recorder.write(events.BarrierReleased(peers=len(swarm.names)))
        await swarm.command(swarm.names, Train())
        crash_point("training_begun")
        if recorder.nemesis is not None:
            recorder.nemesis.start()
        await self._train(self._released + spec.budget.seconds_per_replicate)
        await self._count_links("end")
        return self._peer_table.outcome(spec.budget, self._out_of_time, self._waiter.stopped)

    async def _start_peers(self) -> None:
        """Start all peers and wait until they are at the barrier."""
        timeouts, swarm, peer_table = self._timeouts, self._swarm, self._peer_table
        self._phase = "starting"
        startup = time.monotonic() + timeouts.starting
        spawned = swarm.spawn(self._recorder.spawned(None))
        await self._start_step(asyncio.wait_for(spawned, timeouts.starting))

        first, *others = swarm.names
        if self._spec.meets_at_supervisor:
            home = await asyncio.to_thread(swarm.home_address)
            self._meeting = await asyncio.to_thread(open_meeting, home)
        met = () if self._meeting is None else (self._meeting.address,)
        await swarm.command([first], Start(initial_peers=met))
        await self._reach(
            lambda: bool(peer_table.peers[first].addresses),
            startup,
            f"its DHT within {timeouts.starting:g} s (timeouts.starting)",
        )
        barrier = time.monotonic() + timeouts.barrier
        addresses = peer_table.peers[first].addresses
        await swarm.command(others, Start(initial_peers=tuple(addresses)))
        await self._reach(
            peer_table.all_ready,
            barrier,
            f"the barrier within {timeouts.barrier:g} s (timeouts.barrier)",
        )

    async def _start_step(self, step: Awaitable[None]) -> None:
        """Await a step of the startup, unless the replicate is asked to end."""
        try:
            await self._waiter.unless_stopped(step)
        except asyncio.TimeoutError:
            bound = f"{self._timeouts.starting:g} s (timeouts.starting)"
            raise _Ended(Outcome("lost", f"the peers did not start within {bound}")) from None

    async def _reach(self, reached: Callable[[], bool], deadline: float, what: str) -> None:
        """Wait for a state of the peers during the startup.

        Args:
            reached: Whether the state is reached.
            deadline: Latest time [s of the monotonic clock].
            what: The state and its bound, for the outcome.

        Raises:
            StopRequested: The replicate was asked to end.
            _Ended: A peer has failed, or the time is over.
        """
        waiter = self._waiter
        done = await waiter.until(lambda: reached() or self._trouble() or waiter.stopped, deadline)
        if waiter.stopped is not None:
            raise StopRequested(waiter.stopped)
        await self._raise_trouble()
        if not done:
            late = ", ".join(self._peer_table.missing("ready"))
            raise _Ended(Outcome("lost", f"{late} did not reach {what}"))

    async def _count_links(self, when: Literal["start", "end"]) -> None:
        counted = await self._agents.link_counters()
        if counted:
            self._recorder.write(events.LinkCounted(when=when, nodes=counted))

    # -- training ------------------------------------------------------------------------------

    async def _train(self, deadline: float) -> None:
        """Return when the training of every peer is over, by itself or by a command."""
        peer_table, waiter, nemesis = self._peer_table, self._waiter, self._recorder.nemesis
        # a peer that is asked to stop may be in the middle of an averaging
        patience = self._timeouts.stopping + self._spec.swarm.averaging_timeout

        def ended() -> object:
            return self._trouble() or peer_table.first_finish() or waiter.stopped

        def finished() -> object:
            return self._trouble() or peer_table.all_finished()

        over = await waiter.until(ended, deadline)
        if not over and nemesis is not None:
            over = await self._follow_faults(nemesis, ended, deadline)
        if nemesis is not None:
            await nemesis.release()  # a peer that is stopped or cut off could not end
        await self._raise_trouble()
        reason = peer_table.first_finish()
        if waiter.stopped is None and over and reason == "rounds" and self._spec.trains_together:
            # The other peers are in the same round, and end by themselves unless they hang.
            until = min(deadline, time.monotonic() + patience)
            await waiter.until(lambda: finished() or waiter.stopped, until)
            await self._raise_trouble()
        if peer_table.all_finished():
            return
        self._out_of_time = not over
        self._phase = "stopping"
        why = "stop" if waiter.stopped is not None else reason or "seconds"
        await self._swarm.command(peer_table.running(), Stop(reason=why))
        if waiter.stopped is not None:
            patience = _HURRY_S
        await waiter.until(finished, time.monotonic() + patience)
        if waiter.stopped is None:
            await self._raise_trouble()
        elif not peer_table.all_finished():
            raise StopRequested(waiter.stopped)
        if not peer_table.all_finished():
            hung = ", ".join(peer_table.missing("finished", "gone"))
            raise _Ended(await self._blamed(f"{hung} did not stop within {patience:g} s"))

    async def _follow_faults(
        self, nemesis: Nemesis, ended: Callable[[], object], deadline: float
    ) -> bool:
        """Train on past the deadline if faults were late; return whether the training ended."""
        latest = deadline + (LONGEST - 1) * self._spec.budget.seconds_per_replicate
        await self._waiter.until(lambda: ended() or nemesis.over(), latest)
        over = await self._waiter.until(ended, min(latest, nemesis.quiet_from(deadline)))
        seconds = time.monotonic() - deadline
        if seconds > LATE_S:
            self._recorder.write(events.TrainingExtended(seconds=seconds, slip_s=nemesis.slip_s))
        return over

    def _trouble(self) -> str | None:
        preempted = self._preemptions.problem(self._released is not None)
        return self._log.error or preempted or self._peer_table.trouble()

    async def _raise_trouble(self) -> None:
        trouble = self._trouble()
        if trouble is not None:
            raise _Ended(await self._blamed(trouble))

    async def _blamed(self, trouble: str) -> Outcome:
        # A swarm that lost a node is no measurement of its configuration.
        if self._log.error is not None or self._preemptions.cause is not None:
            return Outcome("lost", trouble)
        return await self._peer_table.blame(trouble, self._swarm.silent_nodes)

    # -- end -----------------------------------------------------------------------------------

    def _valid(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or ``invalid`` if the replicate does not represent its scenario."""
        nemesis = self._recorder.nemesis
        if nemesis is None or outcome.state not in ("completed", "timed_out"):
            return outcome
        problem = nemesis.problem(at_target=outcome == Outcome("completed", TARGET))
        return outcome if problem is None else Outcome("invalid", problem)

    async def _shut_down(self, outcome: Outcome) -> list[str]:
        """End the peers and clean up the nodes; return a text for each thing that remains."""
        self._phase = "stopping"
        swarm, peer_table = self._swarm, self._peer_table
        if self._recorder.nemesis is not None:
            await self._recorder.nemesis.close()
        self._recorder.shutting_down = True
        await self._preemptions.close()
        patience = self._timeouts.teardown
        if outcome.state in ("failed", "stopped", "lost", "pruned"):
            # Before the barrier, peers wait for another command and have nothing to save.
            patience = _HURRY_S if self._released is not None else 0.0
            await swarm.command(peer_table.running(), Stop(reason=outcome.state))
        await swarm.kill(peer_table.late_before_training())  # they wait for another command
        await swarm.command(list(peer_table.peers), Shutdown())
        running = [name for name, peer in peer_table.peers.items() if peer.pid is not None]
        await self._waiter.until(
            lambda: all(peer_table.peers[name].exited for name in running),
            time.monotonic() + patience,
        )
        await swarm.kill([name for name in running if not peer_table.peers[name].exited])
        return await swarm.clear()

    def _check_invariants(self, left: list[str]) -> None:
        """Write an event for each invariant.

        Args:
            left: A text for each thing of the replicate that remains on a node.
        """
        if self._released is None:
            return
        log = on_one_clock(Timeline(self._spec, events.read_events(self._log.path)))
        results = check_all(self._spec, log.events)
        nodes = len({peer.host for peer in self._peer_table.peers.values()})
        clear = events.InvariantChecked(
            name="no_orphans", ok=not left, checked=nodes, violations=left
        )
        for found in (*results, clear):
            self._recorder.write(found)
