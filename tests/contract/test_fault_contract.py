"""What every kind of fault has to keep; a new one is tested as soon as it is registered.

Kinds that act on processes and nodes are also injected, on real processes, into a swarm that
has no swarm, and into one in which nothing happens: there no proof may hold.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rayhive.cluster.node import capabilities, process_group
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.target import CAPABILITIES
from rayhive.registry import FAULTS
from rayhive.spec import Model
from rayhive.spec.fault_plan import At, FaultPlan, PlannedFault
from tests.unit.fault_fakes import FakeSwarm, my_groups, shorten

KINDS = [pytest.param(name, id=name) for name in FAULTS]
#: Those that the fakes can carry out.
OUTSIDE = [
    pytest.param(name, id=name)
    for name, kind in FAULTS.items()
    if kind.group in ("process", "node") and not kind.inside
]
DOCS = [
    line
    for file in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    for line in file.read_text(encoding="utf-8").splitlines()
]
#: What the swarm does itself, whatever the machine allows.
_PLAYED = ("signals", "node", "drain", "link")


def kind_of(name: str) -> type[FaultKind]:
    found: type[FaultKind] = FAULTS.get(name)
    return found


def target_of(name: str) -> str:
    if name == "join":
        return "peer-3"
    return "peer-1" if kind_of(name).targets == "peer" else "node-1"


def made(name: str) -> FaultKind:
    small: dict[str, Any] = {
        key: value
        for key, value in (("notice_s", 0.5), ("grace_s", 0.1), ("cores", 0.05), ("megabytes", 4))
        if key in kind_of(name).Args.model_fields
    }
    args = kind_of(name).Args.model_validate(small).model_dump(mode="json")
    planned = PlannedFault(
        id="f0", kind=name, who=(target_of(name),), at=At(round=1), heal_after_s=1.0, args=args
    )
    return kind_of(name)(planned)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def skip_if_not_here(name: str) -> None:
    for need in kind_of(name).needs:
        reason = capabilities.here()[need]
        if need not in _PLAYED and reason is not None:
            pytest.skip(f"{need}: {reason}")


@pytest.mark.parametrize("name", KINDS)
def test_it_says_what_it_is(name: str) -> None:
    kind = kind_of(name)
    assert issubclass(kind, FaultKind)
    assert kind.about.endswith(".")
    assert "\n" not in kind.about
    assert kind.group in get_args(Group)
    assert kind.targets in ("peer", "node")
    assert set(kind.needs) <= CAPABILITIES.keys()
    assert len(set(kind.needs)) == len(kind.needs)
    assert not (kind.inside and kind.needs not in ((), ("signals",)))
    assert inspect.getdoc(kind) != inspect.getdoc(FaultKind)


@pytest.mark.parametrize("name", KINDS)
def test_its_parameters_have_defaults_and_reasons(name: str) -> None:
    args = kind_of(name).Args
    assert issubclass(args, Model)
    whole = args().model_dump(mode="json")
    assert args.model_validate(json.loads(json.dumps(whole))) == args()
    text = " ".join(inspect.getdoc(base) or "" for base in args.__mro__)
    assert not [field for field in args.model_fields if f"{field}:" not in text]


@pytest.mark.parametrize("name", KINDS)
def test_it_refuses_parameters_that_it_does_not_have(name: str) -> None:
    planned = PlannedFault(
        id="f0", kind=name, who=(target_of(name),), at=At(round=1), args={"no_such": 1}
    )
    with pytest.raises(ValueError, match="no_such"):
        kind_of(name)(planned)


@pytest.mark.parametrize("name", KINDS)
def test_it_survives_the_way_through_a_plan(name: str) -> None:
    plan = FaultPlan(scenario="x", peers=3, faults=(made(name).planned,))
    again = FaultPlan.model_validate_json(plan.canonical())
    assert again.hash == plan.hash
    assert kind_of(name)(again.faults[0]).args == made(name).args


@pytest.mark.parametrize("name", KINDS)
def test_the_docs_have_it_with_its_parameters(name: str) -> None:
    rows = [line for line in DOCS if line.startswith(f"| `{name}` |")]
    assert rows, "no table in docs/ has a row for it"
    said = {*kind_of(name).Args.model_fields, *kind_of(name).needs}
    assert not [word for word in said if not any(f"`{word}`" in row for row in rows)]


@pytest.mark.parametrize("name", KINDS)
def test_tearing_down_what_was_never_set_up_does_nothing(name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        await made(name).teardown(FakeSwarm(tmp_path))

    if kind_of(name).group in ("process", "node"):
        asyncio.run(scene())


@pytest.mark.parametrize("name", OUTSIDE)
def test_it_takes_effect_says_so_heals_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_if_not_here(name)
    monkeypatch.undo()  # with all the patience that it has
    who = [target_of(name)]

    async def scene() -> tuple[dict[str, Any], Proof, dict[str, Any]]:
        async with FakeSwarm(tmp_path, busy=name == "straggler") as swarm:
            kind = made(name)
            await kind.setup(swarm)
            done = await kind.inject(swarm, who)
            proof = await kind.verify(swarm, who)
            healed = await kind.heal(swarm, who) if kind.heals else {}
            await kind.teardown(swarm)
            everybody = set(swarm.lives)
            if kind.heals:
                assert set(swarm.living()) == everybody
            states = [set((await swarm.process_states(peer)).values()) for peer in everybody]
            assert all("stopped" not in state for state in states)
            assert not any(swarm.tools._tools.values())
            return done, proof, healed

    done, proof, healed = asyncio.run(scene())
    assert proof.ok, proof.what
    for said in (done, proof.what, healed):
        assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert my_groups() == []
    assert process_group.mounts_below(tmp_path) == []


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name.values != ("join",)])
def test_its_proof_does_not_hold_where_nothing_happened(name: str, tmp_path: Path) -> None:
    async def scene() -> Proof:
        async with FakeSwarm(tmp_path, deaf=True) as swarm:
            kind = made(name)
            await kind.setup(swarm)
            await kind.inject(swarm, [target_of(name)])
            proof = await kind.verify(swarm, [target_of(name)])
            swarm.deaf = False
            await kind.teardown(swarm)
            return proof

    proof = asyncio.run(scene())
    assert not proof.ok, proof.what


def test_a_joiner_that_does_not_run_is_no_proof_either(tmp_path: Path) -> None:
    async def scene() -> Proof:
        async with FakeSwarm(tmp_path) as swarm:
            kind = made("join")
            await kind.inject(swarm, ["peer-3"])
            swarm.lives["peer-3"].process.kill()
            swarm.lives["peer-3"].process.wait()
            return await kind.verify(swarm, ["peer-3"])

    assert not asyncio.run(scene()).ok
