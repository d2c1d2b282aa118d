"""Fires the faults of a plan, verifies that they took effect, and heals them, each in its time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypedDict, TypeVar

from rayhive.cluster.replicate.fault_target import CAUSE, SwarmTarget
from rayhive.errors import RayhiveError, ReplicateError
from rayhive.events import Event, FaultFailed, FaultFired, FaultHealed, FaultVerified
from rayhive.events.supervisor import FaultPhase
from rayhive.faults.kind import FaultKind
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import DYNAMIC_ROLES, QUIET_S, At, FaultPlan, PlannedFault

T = TypeVar("T")
#: Delay of a fault above which the end of training moves [s].
LATE_S = 0.5


class _Slip(TypedDict, total=False):
    """Delay of a fault, as fields of ``fault_fired``."""

    slip_s: float
    slip_rounds: float


class Nemesis:
    """The faults of one replicate.

    Every fault runs in a task of its own, so faults may overlap. Each step is an event:
    ``fault_fired`` after the injection, ``fault_verified`` with the result of the check,
    ``fault_healed``, and ``fault_failed`` when a step raised an error.

    A fault that is due waits until its targets train: to end a peer that has not begun, or whose
    node is not back yet, would have no effect. If the plan bounds the number of struck peers, the
    fault also waits until other peers are back. The event holds the delay.

    Args:
        plan: The plan.
        target: The swarm.
        write: Receives the events of the faults.
        on_over: Called each time that a fault is over.

    Attributes:
        slip_s: Greatest delay of a fault that was planned by time [s].
    """

    def __init__(
        self,
        plan: FaultPlan,
        target: SwarmTarget,
        write: Callable[[Event], None],
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._target, self._at_most = target, plan.at_most
        self._write, self._on_over = write, on_over
        self._struck: dict[str, tuple[FaultKind, set[str]]] = {}
        self._faults: list[FaultKind] = [
            FAULTS.get(planned.kind)(planned) for planned in plan.faults
        ]
        self._fired: dict[str, float] = {}
        self._begun: set[str] = set()
        self._proved: dict[str, bool] = {}
        self._gone_for_good: set[str] = set()
        self._began = self._closed = math.inf
        self._over: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._set_up: list[FaultKind] = []
        self._round = 0
        self.slip_s = 0.0
        self._changed = asyncio.Event()

    async def setup(self) -> None:
        """Prepare every fault.

        Raises:
            ReplicateError: A fault cannot be prepared.
        """
        for fault in self._faults:
            self._set_up.append(fault)
            try:
                await _bounded(fault, fault.setup(self._target))
            except Exception as error:
                self._failed(fault.planned, "setup", error)
                raise ReplicateError(f"{_title(fault.planned)} can't be set up: {error}") from error

    def start(self) -> None:
        """Start the tasks of the faults, at the start of training."""
        began = self._began = time.monotonic()
        self._tasks = [asyncio.create_task(self._run(fault, began)) for fault in self._faults]

    def over(self) -> bool:
        """Return whether all faults are over, or one has failed."""
        return bool(self._errors) or all(task.done() for task in self._tasks)

    def quiet_from(self, deadline: float) -> float:
        """Return the time until which to train, so that the end is as quiet as planned.

        The deadline moves by the delay of the latest fault. A fault that was planned by round and
        is not over at the deadline has no planned end: :data:`QUIET_S` follow it.

        Args:
            deadline: End of the budget of seconds [s of the monotonic clock].
        """
        until = deadline + (self.slip_s if self.slip_s > LATE_S else 0.0)
        late = [t for t in self._over.values() if t > deadline]
        return max(until, max(late) + QUIET_S) if late else until

    def heard(self, round_: int) -> None:
        """Record a round that a peer has finished; 0 when a peer begins to train."""
        self._round = max(self._round, round_)
        self._wake()

    def _wake(self) -> None:
        """Have the waiting faults check their conditions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self, fault: FaultKind, began: float) -> None:
        planned = fault.planned
        phase: FaultPhase = "inject"
        CAUSE.set(planned.id)
        try:
            await self._due(fault, began)
            slip = self._slip(planned.at, began)
            who = self._who(fault)
            struck = self._target.incarnations_of(who)
            fired_at = time.time()
            self._begun.add(planned.id)
            step = fault.inject(self._target, who)
            done = await (step if fault.in_training else _bounded(fault, step))
            if fault.in_training:  # the round of the act is known only now
                slip = self._slip(planned.at, began)
            self._fired[planned.id] = time.monotonic()
            self.slip_s = max(self.slip_s, slip.get("slip_s", 0.0))
            self._write(
                FaultFired(
                    fault=planned.id,
                    fault_kind=planned.kind,
                    effect=fault.effect,
                    who=list(who),
                    lives=struck or self._target.incarnations_of(who),
                    planned=str(planned.at),
                    began=fired_at,
                    done=done,
                    **slip,
                )
            )
            phase = "verify"
            proof = await _bounded(fault, fault.verify(self._target, who))
            self._proved[planned.id] = proof.ok
            self._write(FaultVerified(fault=planned.id, ok=proof.ok, proof=proof.what))
            if planned.heal_after_s is None or not fault.heals:
                return
            phase = "heal"
            left = self._fired[planned.id] + planned.heal_after_s - time.monotonic()
            await asyncio.sleep(max(0.0, left))
            done = await _bounded(fault, fault.heal(self._target, who))
            self._write(
                FaultHealed(
                    fault=planned.id,
                    lives=self._target.incarnations_of(who),
                    done=done,
                    seconds=time.monotonic() - self._fired[planned.id],
                )
            )
        except Exception as error:
            self._failed(planned, phase, error)
        finally:
            _, struck_peers = self._struck.pop(planned.id, (fault, set()))
            if fault.removes_peers() and (planned.heal_after_s is None or not fault.heals):
                self._gone_for_good |= struck_peers
            self._wake()
            self._over[planned.id] = time.monotonic()
            asyncio.get_running_loop().call_soon(self._on_over)  # when this task is done

    async def _due(self, fault: FaultKind, began: float) -> None:
        """Wait until the fault is due, and can strike."""
        at = fault.planned.at
        if at.seconds is not None:
            await asyncio.sleep(max(0.0, began + at.seconds - time.monotonic()))
        # A fault inside a peer acts in a round before any peer has finished that round.
        last = 0 if at.round is None else at.round - int(fault.in_training)
        while self._round < last:
            await self._changed.wait()
        if not fault.in_training:
            await self._targets_train(fault)

    def _slip(self, at: At, began: float) -> _Slip:
        """Return the delay of a fault."""
        if at.seconds is not None:
            return {"slip_s": time.monotonic() - began - at.seconds}
        assert at.round is not None
        return {"slip_rounds": max(0, self._round - at.round)}

    async def _targets_train(self, fault: FaultKind) -> None:
        """Wait until the fault's targets train and at most ``at_most`` peers are struck.

        A fault that removes peers also waits for the end of an earlier one that removes the same
        peers. A fault of a node does not wait for peers that no fault starts again.
        """
        while True:
            targets = set(self._targets(fault))
            if fault.target_type == "node":
                targets = targets - self._gone_for_good or targets
            train = fault.joins or all(map(self._target.trains, targets))
            if not set(DYNAMIC_ROLES).isdisjoint(fault.planned.who):
                train = train and bool(self._target.training())
            removed = [theirs for other, theirs in self._struck.values() if other.removes_peers()]
            if fault.removes_peers() and not targets.isdisjoint(set().union(*removed)):
                train = False
            if train and (self._at_most is None or self._few(fault, targets, self._at_most)):
                self._struck[fault.planned.id] = fault, targets
                return
            await self._changed.wait()

    def _few(self, fault: FaultKind, targets: set[str], at_most: int) -> bool:
        """Return whether a fault may strike its targets now if ``at_most`` peers may be struck."""
        struck = list(self._struck.values())
        # Faults that leave a peer training may overlap. A fault that takes a peer away may not.
        gentle = not fault.removes_peers()
        # Two faults of one link, or of one kind, could not be verified separately.
        away = [
            theirs
            for other, theirs in struck
            if not gentle
            or other.removes_peers()
            or type(fault) is type(other)
            or fault.group == other.group == "link"
        ]
        down = self._target.down()
        others = down.union(*(theirs for _, theirs in struck)) - targets
        # A gentle fault of a node may strike all peers, if all of them are on that node.
        few = len(targets | others) <= at_most or (gentle and not others)
        return few and targets.isdisjoint(down.union(*away))

    def _targets(self, fault: FaultKind) -> list[str]:
        """Return the replicas that a fault would strike now; a role without a peer has none."""
        target = self._target
        resolved = bool(target.training())
        who = [
            target.role(name) if name in DYNAMIC_ROLES else name
            for name in fault.planned.who
            if resolved or name not in DYNAMIC_ROLES
        ]
        peers = [name for name in who if name.startswith("peer-")]
        nodes = (
            [self._target.node_of(peer) for peer in peers] if fault.target_type == "node" else []
        )
        nodes += [name for name in who if name.startswith("node-")]
        return [*peers, *(peer for node in nodes for peer in self._target.home(node))]

    def _who(self, fault: FaultKind) -> Sequence[str]:
        """Return the replicas or nodes that a fault is aimed at now, roles resolved."""
        target = self._target
        named = [target.role(n) if n in DYNAMIC_ROLES else n for n in fault.planned.who]
        if fault.target_type == "node":
            named = [target.node_of(n) if n.startswith("peer-") else n for n in named]
        else:
            named = target.replicas(named)
        return list(dict.fromkeys(named))

    def _failed(self, planned: PlannedFault, phase: FaultPhase, error: Exception) -> None:
        text = str(error) if isinstance(error, RayhiveError) else repr(error)
        self._errors[planned.id] = f"{phase}: {text}"
        self._write(FaultFailed(fault=planned.id, phase=phase, error=text))

    async def release(self) -> None:
        """Cancel the waiting faults, and undo those that end no peer or node.

        :meth:`close` starts nodes again: it takes seconds, and the other peers would train on.
        """
        if self._closed == math.inf:
            self._closed = time.monotonic()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tear_down([fault for fault in self._set_up if fault.effect != "gone"])

    async def close(self) -> None:
        """Cancel the waiting faults, and have every fault remove its remains."""
        await self.release()
        await self._tear_down(self._set_up)

    async def _tear_down(self, faults: Iterable[FaultKind]) -> None:
        for fault in reversed(list(faults)):
            self._set_up.remove(fault)
            try:
                await _bounded(fault, fault.teardown(self._target))
            except Exception as error:
                self._failed(fault.planned, "teardown", error)

    def problem(self, at_target: bool = False) -> str | None:
        """Return why the replicate does not represent its scenario; None if it does.

        Args:
            at_target: Whether the replicate ended because it reached its target. Faults that were
                due later, and proofs that its end cut off, are then no problem.
        """
        for fault in self._faults:
            planned = fault.planned
            if planned.id in self._errors:
                return f"{_title(planned)} failed: {self._errors[planned.id]}"
            if planned.id not in self._fired:
                if planned.id in self._begun:
                    return f"{_title(planned)} was cut off by the end"
                if at_target and not self._overdue(planned.at):
                    continue
                return f"{_title(planned)} did not fire before the end"
            if not self._proved.get(planned.id, at_target):
                return f"{_title(planned)} was not proved to have taken effect"
        return None

    def _overdue(self, at: At) -> bool:
        """Return whether a fault was due well before the end, and was held back."""
        if at.round is not None and at.seconds is None:
            return self._round > at.round
        return at.seconds is not None and self._began + at.seconds + LATE_S < self._closed


def _title(planned: PlannedFault) -> str:
    return f"{planned.id} ({planned.kind} of {', '.join(planned.who)} at {planned.at})"


async def _bounded(fault: FaultKind, step: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(step, fault.patience_s)
    except asyncio.TimeoutError:
        raise ReplicateError(f"it took longer than {fault.patience_s:g} s") from None
