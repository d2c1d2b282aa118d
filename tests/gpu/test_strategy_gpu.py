"""The strategy on a GPU: the chosen device, every precision, and what stays on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.integration.swarm_helpers import call, forks  # noqa: F401
from tests.integration.toy import FAST, LOOPBACK, NOTHING, Regression, UntilRound, left_behind
from tests.integration.toy import loader as make_loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.swarm, pytest.mark.usefixtures("forks")]

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "32-true"),
    "bf16": ({}, "bf16-mixed"),
    "fp16": ({}, "16-mixed"),
    "fp16, reused": ({"reuse_grad_buffers": True}, "16-mixed"),
    "offloaded": ({"offload_optimizer": True}, "32-true"),
    "fp16, reused, offloaded": (
        {"reuse_grad_buffers": True, "offload_optimizer": True},
        "16-mixed",
    ),
    "powersgd": ({"powersgd_rank": 2}, "32-true"),
    "powersgd, reused": ({"powersgd_rank": 2, "reuse_grad_buffers": True}, "bf16-mixed"),
    "delayed": ({"delay_state_averaging": True, "delay_grad_averaging": True}, "bf16-mixed"),
}


def fit(settings: dict[str, Any], precision: str) -> dict[str, Any]:
    import hivemind
    import torch
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from rayhive import HivemindStrategy

    last = torch.cuda.device_count() - 1
    module = Regression(optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    devices: list[str] = []

    def at_round(trainer: Any) -> None:
        optimizer = trainer.optimizers[0]
        devices.append(str(next(module.parameters()).device))
        devices.append(str(optimizer.opt.param_groups[0]["params"][0].device))

    if rank := settings.pop("powersgd_rank", None):
        settings["grad_averager_factory"] = partial(PowerSGDGradientAverager, averager_rank=rank)
    strategy = HivemindStrategy(
        **{**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK, **settings}
    )
    trainer = make_trainer(
        strategy,
        UntilRound(20, at_round=at_round),
        accelerator="gpu",
        devices=[last],
        precision=precision,
    )
    trainer.fit(module, make_loader())
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "last": f"cuda:{last}",
        "module": devices[0],
        "optimizer": devices[1],
        "scaler": None if scaler is None else isinstance(scaler, hivemind.GradScaler),
        "fell": sum(module.losses[-8:]) / sum(module.losses[:8]),
        "left": left_behind(),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_peer_trains_on_the_chosen_gpu(way: str) -> None:
    settings, precision = WAYS[way]
    result = call(fit, settings=settings, precision=precision).result(120)
    offloaded = "offload_optimizer" in settings or "delay_grad_averaging" in settings
    assert result["module"] == result["last"]
    assert result["optimizer"] == ("cpu" if offloaded else result["last"])
    assert result["scaler"] is (True if precision == "16-mixed" else None)
    assert result["fell"] < 0.9
    assert result["left"] == NOTHING
