"""Checks that every fault kind has to pass; each raises AssertionError with what is missing.

Kinds on processes and nodes run on real processes in a swarm without training, and in one in which
nothing happens: there no proof may hold.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from rayhive.cluster.node import process_group
from rayhive.faults.in_training import InTraining
from rayhive.faults.kind import FaultKind, Group
from rayhive.faults.target import CAPABILITIES
from rayhive.spec import Model
from rayhive.spec.fault_plan import At, PlannedFault
from tests.unit.fault_fakes import FakeSwarm, my_groups

#: Parameters that keep a check short, for the kinds that have them.
_SMALL: dict[str, Any] = {"notice_s": 0.5, "grace_s": 0.1, "cores": 0.05, "megabytes": 4}


def target_of(kind: type[FaultKind]) -> str:
    if kind.joins:
        return "peer-3"
    return f"{kind.target_type}-1"


def planned_for(name: str, kind: type[FaultKind]) -> PlannedFault:
    small = {key: value for key, value in _SMALL.items() if key in kind.Args.model_fields}
    args = kind.Args.model_validate(small).model_dump(mode="json")
    return PlannedFault(
        id="f0", kind=name, who=(target_of(kind),), at=At(round=1), heal_after_s=1.0, args=args
    )


def check_declaration(kind: type[FaultKind]) -> None:
    """The kind is complete and describes itself."""
    assert issubclass(kind, FaultKind)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    assert not inspect.isabstract(kind), f"{kind.__name__} lacks {', '.join(missing)}"
    assert kind.about.endswith(".") and "\n" not in kind.about, "about is one sentence"
    assert kind.group in get_args(Group)
    assert kind.target_type in ("peer", "node")
    assert set(kind.needs) <= CAPABILITIES.keys()
    assert len(set(kind.needs)) == len(kind.needs)
    assert kind.in_training == issubclass(kind, InTraining)
    assert not (kind.in_training and kind.needs), "nothing on the machine is touched"
    overridden = kind.heal is not FaultKind.heal
    assert kind.heals == overridden, "a kind that heals, and no other, implements heal"
    assert inspect.getdoc(kind) != inspect.getdoc(FaultKind)


def check_parameters(name: str, kind: type[FaultKind]) -> None:
    """Parameters have defaults and reasons, unknown ones are refused."""
    args = kind.Args
    assert issubclass(args, Model)
    whole = args().model_dump(mode="json")
    assert args.model_validate(json.loads(json.dumps(whole))) == args()
    text = " ".join(inspect.getdoc(base) or "" for base in args.__mro__)
    undocumented = [field for field in args.model_fields if f"{field}:" not in text]
    assert not undocumented, f"{args.__name__} documents no {', '.join(undocumented)}"
    planned = planned_for(name, kind).model_copy(update={"args": {"no_such": 1}})
    try:
        kind(planned)
    except ValueError as error:
        assert "no_such" in str(error)
    else:
        raise AssertionError(f"{name} takes a parameter that it does not have")


def check_documentation(name: str, kind: type[FaultKind], lines: Sequence[str]) -> None:
    """A table has a row for the kind, with its parameters and needs."""
    rows = [line for line in lines if line.startswith(f"| `{name}` |")]
    assert rows, f"no table in docs/ has a row for {name}"
    words = {*kind.Args.model_fields, *kind.needs}
    missing = [word for word in words if not any(f"`{word}`" in row for row in rows)]
    assert not missing, f"the row of {name} lacks {', '.join(missing)}"


async def check_effect(name: str, kind: type[FaultKind], folder: Path) -> None:
    """On real processes the kind takes effect, proves it, heals it and leaves nothing behind."""
    targets = [target_of(kind)]
    async with FakeSwarm(folder, busy=name == "straggler") as swarm:
        fault = kind(planned_for(name, kind))
        await fault.setup(swarm)
        done = await fault.inject(swarm, targets)
        proof = await fault.verify(swarm, targets)
        assert proof.ok, f"{name} did not take effect: {proof.what}"
        healed = await fault.heal(swarm, targets) if kind.heals else {}
        await fault.teardown(swarm)
        peers = set(swarm.incarnations)
        if kind.heals:
            assert set(swarm.living()) == peers, f"{name} is not healed: a peer is gone"
        states = {s for peer in peers for s in (await swarm.process_states(peer)).values()}
        assert "stopped" not in states, f"{name} leaves processes stopped"
        assert swarm.toolbox.in_use() == [], f"{name} leaves node tools started"
    for record in (done, proof.what, healed):
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert my_groups() == []
    assert process_group.mounts_below(folder) == []


async def check_proof(name: str, kind: type[FaultKind], folder: Path) -> None:
    """The proof does not hold in a swarm in which nothing happens."""
    targets = [target_of(kind)]
    async with FakeSwarm(folder, deaf=True) as swarm:
        fault = kind(planned_for(name, kind))
        await fault.setup(swarm)
        await fault.inject(swarm, targets)
        proof = await fault.verify(swarm, targets)
        swarm.deaf = False
        await fault.teardown(swarm)
    assert not proof.ok, f"the proof of {name} holds although nothing happened: {proof.what}"


class FakeTrainingPeer:
    """The training process of a peer; its gradients change from round to round."""

    scale = 0.5

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.offset_s = 0.0

    def begin(self, round_: int) -> None:
        """Accumulate the gradients of a round."""
        self.gradients = [torch.full((3, 2), float(round_)), torch.tensor([1.0, round_ - 5.0])]

    def skew_clock(self, seconds: float) -> dict[str, float]:
        before, self.offset_s = self.offset_s, seconds
        return {"off_before_s": before, "off_after_s": seconds}


def check_act(name: str, kind: type[FaultKind]) -> None:
    """The act of an in-training kind changes the peer, and only its own measurements prove it."""
    assert issubclass(kind, InTraining)
    fault, peer = kind(planned_for(name, kind)), FakeTrainingPeer()

    def seen() -> str:
        """Return everything about the peer that another peer can observe."""
        return repr((peer.gradients, peer.offset_s, fault.serve([torch.ones(2)])))

    for round_ in range(1, 8):
        peer.begin(round_)
        fault.observe(peer, round_)
    before = seen()
    what = fault.act(peer)
    assert what is not None, f"{name} waits although the peer has a past"
    assert seen() != before, f"the act of {name} changes nothing"
    assert fault.took_effect({"act": name, **what}), f"{name} does not accept its own measurements"
    nothing = {"norm_before": 2.0, "norm_after": 2.0, "cosine": 1.0}
    clock = {"off_before_s": 0.0, "off_after_s": 0.0}
    accepts = fault.took_effect({"act": "nothing", **nothing, **clock})
    assert not accepts, f"the proof of {name} holds although nothing happened"
