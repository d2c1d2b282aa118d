"""Buffers of a module are averaged in company, in every way to keep the optimizer."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hivemind.compression import Uniform8BitQuantization
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager as PowerSGD

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, LOOPBACK, Together, loader, stay_in_rounds
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 6
#: Rounds in which peers that have just met may average their parameters.
MEETING = 3
#: Arguments of the strategy, by name.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "offload": {"offload_optimizer": True},
    "powersgd": {"grad_averager_factory": partial(PowerSGD, averager_rank=1)},
    "8 bit": {"grad_compression": Uniform8BitQuantization(), "error_feedback": True},
    "local steps": {"local_steps": 2},
    "pairs": {"local_steps": 2, "group_size": 2},
    "delay state": {"delay_state_averaging": True},
    "delay gradients": {"delay_state_averaging": True, "delay_grad_averaging": True},
    "every round": {"average_state_every": 1},
    "every round, offload": {"average_state_every": 1, "offload_optimizer": True},
    "every round, delay state": {"average_state_every": 1, "delay_state_averaging": True},
}


class Normed(pl.LightningModule):
    """Has batch norm, whose buffers are floats and a counter, and inputs of its peer's own.

    Args:
        scale: What inputs are multiplied by.
        mean: Mean of the inputs.
    """

    def __init__(self, scale: float, mean: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(3) * int(scale))
        self.scale, self.mean = scale, mean

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        outputs = self.out(self.norm(batch[0] * self.scale + self.mean))
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def one_of_two(folder: str, peer: int, way: str) -> dict[str, Any]:
    from rayhive import HivemindStrategy

    stay_in_rounds()
    rounds: list[tuple[str, str]] = []
    ends: list[dict[str, Any]] = []
    address = Path(folder) / "addresses.json"
    while peer and not address.exists():
        time.sleep(0.02)
    strategy = HivemindStrategy(
        **{**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK, **WAYS[way]},
        initial_peers=json.loads(address.read_text()) if peer else None,
        load_initial_state=False,  # a joiner takes over what is each peer's own, too
        extra_tensors=lambda module: list(module.buffers()),  # as documented
        on_event=lambda kind, fields: (
            rounds.append((fields["outcome"], fields["reason"])) if kind == "state_round" else None
        ),
    )
    if not peer:
        part = Path(folder) / "part"
        part.write_text(json.dumps(strategy.addresses))
        part.rename(address)
    module = Normed(scale=10.0**peer, mean=30.0**peer)

    def note(trainer: Any) -> None:
        trainer.optimizers[0].settle()
        ends.append({name: buffer.tolist() for name, buffer in module.named_buffers()})

    together = Together(folder, peer, rounds=ROUNDS, at_round=note)
    make_trainer(strategy, together).fit(module, loader(seed=peer))
    return {"rounds": rounds, "ends": ends, "global_step": module.trainer.global_step}


#: Ways that only ``make test-all`` tests.
SLOW = ("offload", "pairs", "delay state", "every round, offload", "every round, delay state")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS]
)
def test_the_documented_buffers_are_averaged(tmp_path: Path, way: str) -> None:
    children = [call(one_of_two, folder=str(tmp_path), peer=p, way=way) for p in (0, 1)]
    first, second = (child.result() for child in children)
    for peer in (first, second):
        reasons = [reason for outcome, reason in peer["rounds"] if outcome == "averaged"]
        if "average_state_every" in WAYS[way]:
            assert "period" in reasons and len(reasons) >= ROUNDS - 1
        else:
            assert set(reasons) <= {"joined"} and len(reasons) <= MEETING
    for name in ("norm.running_mean", "norm.running_var"):
        for one, other in zip(first["ends"][MEETING:], second["ends"][MEETING:], strict=True):
            if "delay_grad_averaging" in WAYS[way]:  # each keeps what its last batches changed
                # also if peer 1 has one batch in a round and peer 0 three
                assert min(one[name]) > 1.5, "peer 0 alone would not come that far"
            else:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name
        assert first["ends"][-1][name] != first["ends"][0][name]
    for number, peer in enumerate((first, second)):
        end = peer["ends"][-1]
        assert end["table"] == [0, 10**number, 2 * 10**number], "each peer's own"
        assert end["norm.num_batches_tracked"] >= ROUNDS
