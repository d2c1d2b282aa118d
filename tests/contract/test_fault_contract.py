"""The contract of fault kinds, over the registry: a new kind is tested when it is registered."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node import capabilities
from rayhive.faults.in_training import InTraining, RoundsArgs, TrainingPeer
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.kinds.kill import Kill
from rayhive.faults.target import FaultTarget
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import FaultPlan
from tests.contract.fault_checks import (
    check_act,
    check_declaration,
    check_documentation,
    check_effect,
    check_parameters,
    check_proof,
    planned_for,
    target_of,
)
from tests.unit.fault_fakes import FakeSwarm, shorten

KINDS = [pytest.param(name, kind, id=name) for name, kind in FAULTS.items()]
IN_TRAINING = [param for param in KINDS if param.values[1].in_training]
#: Kinds that the fake swarm can carry out.
OUTSIDE = [
    param
    for param in KINDS
    if param.values[1].group in ("process", "node") and param not in IN_TRAINING
]
DOCS = [
    line
    for file in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    for line in file.read_text(encoding="utf-8").splitlines()
]
#: Capabilities that the fake swarm plays.
_PLAYED = ("signals", "node", "drain", "link")


def skip_if_not_here(kind: type[FaultKind]) -> None:
    for need in kind.needs:
        reason = capabilities.here()[need]
        if need not in _PLAYED and reason is not None:
            pytest.skip(f"{need}: {reason}")


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_it_is_complete(name: str, kind: type[FaultKind]) -> None:
    check_declaration(kind)
    check_parameters(name, kind)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_it_survives_the_way_through_a_plan(name: str, kind: type[FaultKind]) -> None:
    planned = planned_for(name, kind)
    plan = FaultPlan(scenario="x", peers=3, faults=(planned,))
    again = FaultPlan.model_validate_json(plan.canonical())
    assert again.hash == plan.hash
    assert kind(again.faults[0]).args == kind(planned).args


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_docs_have_it_with_its_parameters(name: str, kind: type[FaultKind]) -> None:
    check_documentation(name, kind, DOCS)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_tearing_down_a_fault_that_was_never_set_up_does_nothing(
    name: str, kind: type[FaultKind], tmp_path: Path
) -> None:
    asyncio.run(kind(planned_for(name, kind)).teardown(FakeSwarm(tmp_path)))


@pytest.mark.parametrize(("name", "kind"), IN_TRAINING)
def test_its_act_changes_the_peer_and_proves_it(name: str, kind: type[FaultKind]) -> None:
    check_act(name, kind)


@pytest.mark.parametrize(("name", "kind"), OUTSIDE)
def test_it_takes_effect_proves_it_heals_and_leaves_nothing(
    name: str, kind: type[FaultKind], tmp_path: Path
) -> None:
    skip_if_not_here(kind)
    asyncio.run(check_effect(name, kind, tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"), [param for param in OUTSIDE if not param.values[1].joins]
)
def test_its_proof_does_not_hold_where_nothing_happened(
    name: str, kind: type[FaultKind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    asyncio.run(check_proof(name, kind, tmp_path))


def test_a_joiner_that_does_not_run_is_no_proof_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)

    async def scene() -> Proof:
        async with FakeSwarm(tmp_path) as swarm:
            join: type[FaultKind] = FAULTS.get("join")
            fault, targets = join(planned_for("join", join)), [target_of(join)]
            await fault.inject(swarm, targets)
            swarm.incarnations["peer-3"].process.kill()
            swarm.incarnations["peer-3"].process.wait()
            return await fault.verify(swarm, targets)

    assert not asyncio.run(scene()).ok


# -- kinds that are half finished are found ------------------------------------------------------


class WithoutAct(InTraining):
    """A kind in the training that has a proof only."""

    about = "Has no act."
    args: RoundsArgs

    def took_effect(self, what: dict[str, Any]) -> bool:
        return True


class IdleAct(WithoutAct):
    """A kind in the training whose act does nothing."""

    def act(self, peer: TrainingPeer) -> dict[str, Any]:
        return {}


class WithoutProof(FaultKind):
    """A kind without a proof."""

    about = "Has no proof."
    group = "process"

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        return {}


class SelfAssured(WithoutProof):
    """A kind whose proof looks at nothing."""

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        return Proof(True)


class DoesNotHeal(Kill):
    """A kind that heals in name only."""

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        return {}


class LeavesStopped(Kill):
    """A kind that leaves processes stopped."""

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        self._hit = {peer: await swarm.signal(peer, signal.SIGSTOP) for peer in targets}
        return {}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        return Proof(True)

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        return {}


class Silent(SelfAssured):
    """A kind that declares a heal and has none."""

    heals = True


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WithoutAct, "WithoutAct lacks act"),
        (WithoutProof, "WithoutProof lacks verify"),
        (Silent, "implements heal"),
    ],
)
def test_an_incomplete_kind_is_found(kind: type[FaultKind], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_declaration(kind)


def test_an_act_that_does_nothing_is_found() -> None:
    with pytest.raises(AssertionError, match="changes nothing"):
        check_act("idle", IdleAct)


def test_a_proof_that_always_holds_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="although nothing happened"):
        asyncio.run(check_proof("self_assured", SelfAssured, tmp_path))


@pytest.mark.parametrize(
    ("kind", "text"), [(DoesNotHeal, "is not healed"), (LeavesStopped, "leaves processes stopped")]
)
def test_a_heal_that_does_nothing_is_found(
    kind: type[FaultKind], text: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=text):
        asyncio.run(check_effect("half", kind, tmp_path))


def test_a_kind_without_a_row_in_the_documentation_is_found() -> None:
    with pytest.raises(AssertionError, match="no table in docs/ has a row for half"):
        check_documentation("half", Kill, DOCS)
    with pytest.raises(AssertionError, match="lacks where"):
        check_documentation("kill", Kill, ["| `kill` | SIGKILL | – | `signals` |"])
