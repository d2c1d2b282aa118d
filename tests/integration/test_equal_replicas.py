"""On real peers, complete rounds leave replicas equal to the bit, without averaging parameters.

Peers average their parameters when they join each other, and never again.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.swarm_helpers import call
from tests.integration.toy import (
    FAST,
    LOOPBACK,
    Regression,
    Together,
    address_in,
    loader,
    share_address,
    stay_in_rounds,
)
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 6
#: Codec, rank of PowerSGD and further options of the strategy, by name.
WAYS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "none": ("none", None, {}),
    "float16": ("float16", None, {"offload_optimizer": True}),
    "uniform8 with feedback": ("uniform8", None, {"error_feedback": True}),
    "scaled_float16, state": ("scaled_float16", None, {"delay_state_averaging": True}),
    "quantile8, optimizer": (
        "quantile8",
        None,
        {"delay_state_averaging": True, "delay_optimizer_step": True},
    ),
    "powersgd": ("none", 2, {}),
    "powersgd of 8 bits, gradients": (
        "uniform8",
        2,
        {
            "delay_state_averaging": True,
            "delay_grad_averaging": True,
            "error_feedback": True,
        },
    ),
}
#: Elements from which a codec uses 8 bits; two of four tensors are larger.
THRESHOLDS = {"size_adaptive": 128}
#: Every codec with every delay, dense and with PowerSGD; half of them with error feedback.
DELAYS = ("state", "optimizer_step", "grad_averaging")
EVERY: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    f"{codec}, rank {rank}, {delayed} delays": (
        codec,
        rank,
        {"delay_state_averaging": delayed > 0}
        | {f"delay_{name}": True for name in DELAYS[1:delayed]}
        | ({"error_feedback": True} if delayed % 2 == (rank is None) else {}),
    )
    for codec in ("none", "float16", "scaled_float16", "uniform8", "quantile8", "size_adaptive")
    for rank in (None, 2)
    for delayed in range(4)
}
#: Rounds in which peers that have just met may average their parameters; with delays, a request
#: travels with one round and is met in the next.
MEETING = 3


def digest(tensors: Any) -> str:
    """Return a hash of every bit of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def replica(folder: str, peer: int, peers: int, ways: list[str]) -> dict[str, Any]:
    """Train in company in each of the ways; return the digests of the final state, and events."""
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as PowerSGD

    from rayhive import HivemindStrategy
    from rayhive.registry import CODECS

    stay_in_rounds()
    found = {}
    for number, way in enumerate(ways):
        codec, rank, options = (WAYS | EVERY)[way]
        meeting = Path(folder) / str(number)
        meeting.mkdir(exist_ok=True)
        events: list[tuple[str, int, str, Any]] = []

        def note(kind: str, fields: dict[str, Any], seen: list[Any] = events) -> None:
            lost = fields.get("banned"), fields.get("failures")
            if kind == "round":
                seen.append((kind, fields["round"], fields["outcome"], lost))
            elif kind == "state_round":
                seen.append((kind, fields["round"], fields["reason"], lost))

        strategy = HivemindStrategy(
            **{
                **FAST,
                "on_event": note,
                # a busy machine may take seconds over a part, and the round must be complete
                "averaging_timeout": 60.0,
                "target_batch_size": 110,
                "run_id": f"equal{number}",
                "host_maddrs": LOOPBACK,
                "initial_peers": None if peer == 0 else address_in(meeting),
                "grad_compression": CODECS.get(codec)().build(THRESHOLDS.get(codec)),
                "grad_averager_factory": rank and partial(PowerSGD, averager_rank=rank),
                **options,
            }
        )
        if peer == 0:
            share_address(strategy, meeting)
        module = Regression(optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
        together = Together(str(meeting), peer, peers, rounds=ROUNDS)
        fitted = make_trainer(strategy, together)
        fitted.fit(module, loader(seed=peer, batch_size=(16, 9, 5)[peer % 3]))
        state = fitted.optimizers[0].state_averager.optimizer.state
        statistics = [each[key] for each in state.values() for key in ("exp_avg", "exp_avg_sq")]
        found[way] = [digest(module.parameters()), digest(statistics), events]
    return found


def slow(name: str, peers: int, ways: list[str]) -> Any:
    return pytest.param(peers, ways, marks=pytest.mark.slow, id=name)


@pytest.mark.parametrize(
    ("peers", "ways"),
    [
        pytest.param(2, list(WAYS), id="2"),
        slow("3", 3, list(WAYS)),
        slow("8", 8, ["uniform8 with feedback", "powersgd of 8 bits, gradients"]),
        *(
            slow(f"{peers}, {delayed} delays", peers, [w for w in EVERY if f"{delayed} d" in w])
            for peers in (2, 3)
            for delayed in range(4)
        ),
    ],
)
def test_complete_rounds_leave_equal_replicas(tmp_path: Path, peers: int, ways: list[str]) -> None:
    arguments = {"folder": str(tmp_path), "peers": peers, "ways": ways}
    children = [call(replica, peer=peer, **arguments) for peer in range(peers)]
    results = [child.result(400) for child in children]
    for way in ways:
        parameters, statistics, logs = zip(*(result[way] for result in results), strict=True)
        for log in logs:
            partly = [event for event in log if event[0] == "round" and event[2] != "averaged"]
            assert not partly, f"{way}: {partly}"
            averaged = [event[1:3] for event in log if event[0] == "state_round"]
            late = [event for event in averaged if event[0] > MEETING or event[1] != "joined"]
            assert not late, f"{way}: {averaged}"
        assert len(set(parameters)) == 1, f"{way}: parameters differ"
        assert len(set(statistics)) == 1, f"{way}: statistics of the optimizer differ"
