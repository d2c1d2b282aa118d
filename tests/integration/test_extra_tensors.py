"""Buffers of a module are averaged in company, in every way to keep the optimizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, LOOPBACK, Together, loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 6


class Normed(pl.LightningModule):
    """Has batch norm, whose buffers are floats and a counter, and inputs of its peer's own scale.

    Args:
        scale: What inputs are multiplied by.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(3) * int(scale))
        self.scale = scale

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        outputs = self.out(self.norm(batch[0] * self.scale + self.scale))
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def one_of_two(folder: str, peer: int, flags: dict[str, Any]) -> dict[str, Any]:
    from rayhive import HivemindStrategy

    rounds: list[str] = []
    ends: list[dict[str, Any]] = []
    address = Path(folder) / "addresses.json"
    while peer and not address.exists():
        time.sleep(0.02)
    strategy = HivemindStrategy(
        **{**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK, **flags},
        initial_peers=json.loads(address.read_text()) if peer else None,
        load_initial_state=False,  # a joiner takes over what is each peer's own, too
        extra_tensors=lambda module: list(module.buffers()),  # as documented
        on_event=lambda kind, fields: (
            rounds.append(fields["outcome"]) if kind == "state_round" else None
        ),
    )
    if not peer:
        part = Path(folder) / "part"
        part.write_text(json.dumps(strategy.addresses))
        part.rename(address)
    module = Normed(scale=10.0**peer)

    def note(trainer: Any) -> None:
        trainer.optimizers[0].state_averager.step(wait_for_delayed_updates=True)
        ends.append({name: buffer.tolist() for name, buffer in module.named_buffers()})

    together = Together(folder, peer, rounds=ROUNDS, at_round=note)
    make_trainer(strategy, together).fit(module, loader(seed=peer))
    return {"rounds": rounds, "ends": ends, "global_step": module.trainer.global_step}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"offload_optimizer": True},
        {"delay_state_averaging": True},
        {"delay_state_averaging": True, "delay_grad_averaging": True},
    ],
    ids=str,
)
def test_the_documented_buffers_are_averaged(tmp_path: Path, flags: dict[str, Any]) -> None:
    children = [call(one_of_two, folder=str(tmp_path), peer=p, flags=flags) for p in (0, 1)]
    first, second = (child.result() for child in children)
    for peer in (first, second):
        assert set(peer["rounds"]) == {"averaged"} and len(peer["rounds"]) >= ROUNDS - 1
    for name in ("norm.running_mean", "norm.running_var"):
        for one, other in zip(first["ends"], second["ends"], strict=True):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        assert first["ends"][-1][name] != first["ends"][0][name]
    for number, peer in enumerate((first, second)):
        end = peer["ends"][-1]
        assert end["table"] == [0, 10**number, 2 * 10**number], "each peer's own"
        assert end["norm.num_batches_tracked"] >= ROUNDS
