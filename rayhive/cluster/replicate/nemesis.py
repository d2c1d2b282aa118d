"""Fires the faults of a plan, proves that they took effect, and heals them, each in its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import rayhive.faults  # noqa: F401 - fills the registry
from rayhive.cluster.replicate.fault_target import CAUSE, SwarmTarget
from rayhive.errors import RayhiveError, ReplicateError
from rayhive.faults.kind import FaultKind
from rayhive.faults.queries import JOIN, takes_away
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import DYNAMIC_ROLES, QUIET_S, At, FaultPlan, PlannedFault

T = TypeVar("T")
#: A fault that is later than this moves the end of training [s].
LATE_S = 0.5


class Nemesis:
    """The faults of one replicate.

    Every fault runs in a task of its own, so faults may overlap. What a fault does is an event:
    ``fault_fired`` when it was injected, ``fault_verified`` when there is a proof, or a proof that
    it did not take effect, ``fault_healed``, and ``fault_failed`` when a step raised an error.

    A fault that is due waits until the peers that it strikes train: what ends a peer that has not
    begun, or a node that is not back yet, breaks nothing. Where the plan bounds how many may be
    struck at once, it also waits for the others to be back. How late it is, is in its event.

    Args:
        plan: The plan.
        target: The swarm.
        on_over: Called each time that a fault is over.
    """

    def __init__(
        self, plan: FaultPlan, target: SwarmTarget, on_over: Callable[[], None] = lambda: None
    ) -> None:
        self._target, self._at_most, self._on_over = target, plan.at_most, on_over
        self._struck: dict[str, tuple[FaultKind, set[str]]] = {}
        self._faults: list[FaultKind] = [
            FAULTS.get(planned.kind)(planned) for planned in plan.faults
        ]
        self._fired: dict[str, float] = {}
        self._verified: set[str] = set()
        self._over: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._set_up: list[FaultKind] = []
        self._round = 0
        self._slip_s = 0.0
        self._news = asyncio.Event()

    async def setup(self) -> None:
        """Prepare every fault.

        Raises:
            ReplicateError: One cannot be prepared.
        """
        for fault in self._faults:
            self._set_up.append(fault)
            try:
                await _bounded(fault, fault.setup(self._target))
            except Exception as error:
                self._failed(fault.planned, "setup", error)
                raise ReplicateError(f"{_title(fault.planned)} can't be set up: {error}") from error

    def start(self) -> None:
        """Begin to count: training starts now."""
        began = time.monotonic()
        self._tasks = [asyncio.create_task(self._run(fault, began)) for fault in self._faults]

    @property
    def slip_s(self) -> float:
        """Greatest delay of a fault that was planned by time [s]."""
        return self._slip_s

    def over(self) -> bool:
        """Return whether nothing is left to wait for: all is over, or a fault has failed."""
        return bool(self._errors) or all(task.done() for task in self._tasks)

    def quiet_from(self, deadline: float) -> float:
        """Return until when to train on, so that the end is as quiet as it was planned.

        The deadline moves by the delay of the latest fault. A fault of a round that is not over at
        the deadline has no planned end: :data:`QUIET_S` follow it.

        Args:
            deadline: When the budget of seconds is spent (of the monotonic clock).
        """
        until = deadline + (self._slip_s if self._slip_s > LATE_S else 0.0)
        late = [t for t in self._over.values() if t > deadline]
        return max(until, max(late) + QUIET_S) if late else until

    def heard(self, round_: int) -> None:
        """Take note of a round that some peer has finished, 0 for one that begins to train."""
        self._round = max(self._round, round_)
        self._tell()

    def _tell(self) -> None:
        """Wake up who waits for its time."""
        self._news.set()
        self._news = asyncio.Event()

    async def _run(self, fault: FaultKind, began: float) -> None:
        planned, phase = fault.planned, "inject"
        CAUSE.set(planned.id)
        try:
            await self._due(fault, began)
            slip = self._slip(planned.at, began)
            who = self._who(fault)
            lives = self._target.lives_of(who)
            fired_at = time.time()
            step = fault.inject(self._target, who)
            done = await (step if fault.inside else _bounded(fault, step))
            if fault.inside:  # only now it is known when the peer did it
                slip = self._slip(planned.at, began)
            self._fired[planned.id] = time.monotonic()
            self._slip_s = max(self._slip_s, slip.get("slip_s", 0.0))
            self._target.note(
                "fault_fired",
                fault=planned.id,
                fault_kind=planned.kind,
                effect=fault.effect,
                who=list(who),
                lives=lives or self._target.lives_of(who),
                planned=str(planned.at),
                began=fired_at,
                done=done,
                **slip,
            )
            phase = "verify"
            proof = await _bounded(fault, fault.verify(self._target, who))
            if proof.ok:
                self._verified.add(planned.id)
            self._target.note("fault_verified", fault=planned.id, ok=proof.ok, proof=proof.what)
            if planned.heal_after_s is None or not fault.heals:
                return
            phase = "heal"
            left = self._fired[planned.id] + planned.heal_after_s - time.monotonic()
            await asyncio.sleep(max(0.0, left))
            done = await _bounded(fault, fault.heal(self._target, who))
            self._target.note(
                "fault_healed",
                fault=planned.id,
                lives=self._target.lives_of(who),
                done=done,
                seconds=time.monotonic() - self._fired[planned.id],
            )
        except Exception as error:
            self._failed(planned, phase, error)
        finally:
            self._struck.pop(planned.id, None)
            self._tell()
            self._over[planned.id] = time.monotonic()
            asyncio.get_running_loop().call_soon(self._on_over)  # when this task is done

    async def _due(self, fault: FaultKind, began: float) -> None:
        """Wait until the fault is due, and can strike."""
        at = fault.planned.at
        if at.seconds is not None:
            await asyncio.sleep(max(0.0, began + at.seconds - time.monotonic()))
        # what a peer does in a round it does before anybody has finished that
        last = 0 if at.round is None else at.round - int(fault.inside)
        while self._round < last:
            await self._news.wait()
        if not fault.inside:
            await self._there(fault)

    def _slip(self, at: At, began: float) -> dict[str, Any]:
        """Return how late it is for a fault."""
        if at.seconds is not None:
            return {"slip_s": time.monotonic() - began - at.seconds}
        assert at.round is not None
        return {"slip_rounds": max(0, self._round - at.round)}

    async def _there(self, fault: FaultKind) -> None:
        """Wait until those whom a fault strikes are there, and not too many others are not."""
        while True:
            slots = set(self._strikes(fault))
            there = fault.planned.kind == JOIN or all(map(self._target.trains, slots))
            if not set(DYNAMIC_ROLES).isdisjoint(fault.planned.who):
                there = there and bool(self._target.training())
            if there and (self._at_most is None or self._few(fault, slots, self._at_most)):
                self._struck[fault.planned.id] = fault, slots
                return
            await self._news.wait()

    def _few(self, fault: FaultKind, slots: set[str], at_most: int) -> bool:
        """Return whether a fault may strike slots now, where at most so many may be struck."""
        struck = list(self._struck.values())
        # what lets a peer go on training may meet its like; what ends or stops it comes alone
        gentle = not takes_away(fault.planned.kind)
        # and of two faults of one link neither could be proved
        away = [
            those
            for other, those in struck
            if not gentle or takes_away(other.planned.kind) or fault.group == other.group == "link"
        ]
        down = self._target.down()
        others = down.union(*(those for _, those in struck)) - slots
        # what is gentle to a node may be so to all peers, if they are on one
        few = len(slots | others) <= at_most or (gentle and not others)
        return few and slots.isdisjoint(down.union(*away))

    def _strikes(self, fault: FaultKind) -> list[str]:
        """Return the slots that a fault strikes; none for a role, which goes to who is there."""
        who = [name for name in fault.planned.who if name not in DYNAMIC_ROLES]
        slots = [name for name in who if name.startswith("peer-")]
        nodes = [self._target.node_of(slot) for slot in slots] if fault.targets == "node" else []
        nodes += [name for name in who if name.startswith("node-")]
        return [*slots, *(slot for node in nodes for slot in self._target.home(node))]

    def _who(self, fault: FaultKind) -> Sequence[str]:
        target = self._target
        named = [target.role(n) if n in DYNAMIC_ROLES else n for n in fault.planned.who]
        if fault.targets == "node":
            named = [target.node_of(n) if n.startswith("peer-") else n for n in named]
        else:
            named = target.slots(named)
        return list(dict.fromkeys(named))

    def _failed(self, planned: PlannedFault, phase: str, error: Exception) -> None:
        text = str(error) if isinstance(error, RayhiveError) else repr(error)
        self._errors[planned.id] = f"{phase}: {text}"
        self._target.note("fault_failed", fault=planned.id, phase=phase, error=text)

    async def close(self) -> None:
        """Stop counting, and have every fault remove what may be left of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for fault in reversed(self._set_up):
            try:
                await _bounded(fault, fault.teardown(self._target))
            except Exception as error:
                self._failed(fault.planned, "teardown", error)
        self._set_up = []

    def problem(self) -> str | None:
        """Return why the replicate does not stand for its scenario, None if it does."""
        for fault in self._faults:
            planned = fault.planned
            if planned.id in self._errors:
                return f"{_title(planned)} failed: {self._errors[planned.id]}"
            if planned.id not in self._fired:
                return f"{_title(planned)} did not fire before the end"
            if planned.id not in self._verified:
                return f"{_title(planned)} was not proved to have taken effect"
        return None


def _title(planned: PlannedFault) -> str:
    return f"{planned.id} ({planned.kind} of {', '.join(planned.who)} at {planned.at})"


async def _bounded(fault: FaultKind, step: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(step, fault.patience_s)
    except asyncio.TimeoutError:
        raise ReplicateError(f"it took longer than {fault.patience_s:g} s") from None
