"""Contract of a fault kind: set up, inject, verify, heal, tear down."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from rayhive.events.supervisor import FaultEffect
from rayhive.faults.node_tools import ToolHandle
from rayhive.faults.steps import stop_all
from rayhive.faults.target import FaultTarget
from rayhive.registry import FAULTS
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

#: Names of replicas or nodes.
Targets: TypeAlias = Sequence[str]
#: Details for the event of an injection or a heal, as JSON values.
Record: TypeAlias = dict[str, Any]
Group = Literal["process", "node", "link", "training", "clock"]


class NoArgs(Model):
    """Parameters of a kind that has none."""


@dataclass(frozen=True)
class Proof:
    """Result of checking whether a fault took effect.

    Attributes:
        ok: Whether it did.
        what: Observations that show it; written to the ``fault_verified`` event.
    """

    ok: bool
    what: dict[str, Any] = field(default_factory=dict)


class FaultKind(ABC):
    """One kind of fault, bound to one planned fault.

    The nemesis calls :meth:`setup` before training starts, :meth:`inject` and :meth:`verify` when
    the fault is due, :meth:`heal` ``heal_after_s`` after the injection (or never), and
    :meth:`teardown` at the end of the replicate, also after errors. Nothing of the fault may remain
    after the teardown.

    Attributes:
        about: Summary in one sentence, for ``rayhive scenario list`` and the documentation.
        group: Layer that the fault breaks.
        needs: Capabilities that the machine must have: keys of
            :data:`rayhive.faults.target.CAPABILITIES`. Parameters may need more
            (:meth:`needs_for`).
        target_type: Whether the fault acts on peers or on nodes. A peer or role that a plan gives
            to a fault on nodes stands for the node that the peer is on.
        effect: State of the targets while the fault lasts.
        heals: Whether the fault lasts until it is healed. Without ``heal_after_s`` in the plan it
            then lasts to the end.
        joins: Whether the fault starts peers that are new to the swarm.
        in_training: Whether the peer's training process executes the fault itself, from its spec,
            in the planned round.
        of_swarm: Whether the fault acts on parts that only hivemind peers have, so that a baseline
            cannot suffer it.
        Args: Model of the parameters, with defaults; unknown parameters are refused. A kind with
            parameters annotates ``args`` with the model.
        args: Parameters of the planned fault.
        tools: Node tools that the fault has started, by the name of their target. The teardown
            stops those that are left.
    """

    about: ClassVar[str]
    group: ClassVar[Group]
    needs: ClassVar[tuple[str, ...]] = ("signals",)
    target_type: ClassVar[Literal["peer", "node"]] = "peer"
    effect: ClassVar[FaultEffect] = "none"
    heals: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    in_training: ClassVar[bool] = False
    of_swarm: ClassVar[bool] = False
    Args: ClassVar[type[Model]] = NoArgs
    args: Model

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.Args = inspect.get_annotations(cls, eval_str=True).get("args", cls.Args)

    @classmethod
    def needs_for(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the capabilities needed with the given parameters of a plan or scenario."""
        return cls.needs

    @classmethod
    def removes_peers(cls) -> bool:
        """Return whether the targets do not train, until the heal if there is one."""
        return cls.effect in ("gone", "stopped")

    @classmethod
    def gives_notice(cls) -> bool:
        """Return whether peers are notified before their end (parameter ``notice_s``)."""
        return "notice_s" in cls.Args.model_fields

    @classmethod
    def notice_s(cls, args: Mapping[str, Any]) -> float:
        """Return the time between the notice and the end of a peer [s]; 0 without a notice."""
        default = cls.Args.model_fields["notice_s"].default if cls.gives_notice() else 0.0
        given = args.get("notice_s", default)
        return float(given) if isinstance(given, (int, float)) else 0.0

    @classmethod
    def last_round(cls, first: int, args: Mapping[str, Any]) -> int:
        """Return the last round of a fault that acts from round ``first`` on.

        A kind with the parameter ``rounds`` acts in so many rounds, others in one. A value that is
        no number counts as one round; validation reports it.
        """
        if "rounds" not in cls.Args.model_fields:
            return first
        rounds = args.get("rounds", cls.Args.model_fields["rounds"].default)
        return first + rounds - 1 if isinstance(rounds, int) else first

    def __init__(self, planned: PlannedFault) -> None:
        self.planned = planned
        self.args = self.Args.model_validate(planned.args)
        self.tools: dict[str, ToolHandle[Any, Any]] = {}

    async def setup(self, swarm: FaultTarget) -> None:
        """Prepare the fault before training starts."""
        return

    @abstractmethod
    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Inject the fault.

        Args:
            swarm: The swarm.
            targets: Replicas or nodes that the plan's ``who`` resolves to now.

        Returns:
            Record of the injection, for the ``fault_fired`` event.
        """

    @abstractmethod
    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check from outside, within :attr:`patience_s`, that the fault took effect."""

    @property
    def patience_s(self) -> float:
        """Time limit of each step [s], notice included; exceeding it is an error."""
        return 60.0 + self.notice_s(self.planned.args)

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Undo the fault; return the record for the ``fault_healed`` event."""
        return {}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Remove any remains of the fault. Called once, also after errors."""
        await stop_all(self.tools)


def kind_of(name: str) -> type[FaultKind]:
    """Return a registered kind.

    The base class stands for an unknown name, which validation reports: it has no properties.
    """
    return FAULTS.get(name) if name in FAULTS else FaultKind


def needs_of(faults: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, frozenset[str]]:
    """Return the capabilities that each kind needs, over all of its faults.

    Args:
        faults: Kinds with parameters, as a plan or a scenario gives them. An unknown kind needs
            nothing.

    Returns:
        Kind -> keys of :data:`rayhive.faults.target.CAPABILITIES`.
    """
    needs: dict[str, frozenset[str]] = {}
    for name, args in faults:
        known = kind_of(name).needs_for(args) if name in FAULTS else ()
        needs[name] = needs.get(name, frozenset()).union(known)
    return needs
