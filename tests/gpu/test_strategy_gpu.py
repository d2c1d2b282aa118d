"""The strategy on a GPU that two peers share: every precision, and what stays on the host."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call, forks  # noqa: F401
from tests.integration.toy import (
    FAST,
    LOOPBACK,
    NOTHING,
    Regression,
    Together,
    flat,
    left_behind,
    loader,
    stay_in_rounds,
)
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.swarm, pytest.mark.usefixtures("forks")]

ROUNDS = 20
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


def fit(
    settings: dict[str, Any], precision: str, peer: int, folder: str, accelerator: str = "gpu"
) -> dict[str, Any]:
    """Train as one of two peers, on the last GPU; return what was seen."""
    import hivemind
    import torch
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    from rayhive import HivemindStrategy

    stay_in_rounds()
    on_gpu = accelerator == "gpu"
    last = torch.cuda.device_count() - 1
    module = Regression(seed=peer, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    devices: list[str] = []
    sizes: list[int] = []

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            sizes.append(fields.get("group_size", 1))

    def at_round(trainer: Any) -> None:
        optimizer = trainer.optimizers[0]
        devices.append(str(next(module.parameters()).device))
        devices.append(str(optimizer.opt.param_groups[0]["params"][0].device))

    if rank := settings.pop("powersgd_rank", None):
        settings["grad_averager_factory"] = partial(
            PowerSGDGradientAverager, averager_rank=rank, min_compression_ratio=0.5
        )
    strategy = HivemindStrategy(
        **{**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK, **settings},
        on_event=on_event,
    )
    trainer = make_trainer(
        strategy,
        Together(folder, peer, rounds=ROUNDS, at_round=at_round),
        accelerator=accelerator,
        devices=[last] if on_gpu else 1,
        precision=precision,
        # else Lightning looks for one, and where mpi4py is installed, MPI starts a daemon
        plugins=[LightningEnvironment()],
    )
    trainer.fit(module, loader(seed=peer))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "chosen": f"cuda:{last}" if on_gpu else "cpu",
        "module": devices[0],
        "optimizer": devices[1],
        "scaler": None if scaler is None else isinstance(scaler, hivemind.GradScaler),
        "fell": sum(module.losses[-8:]) / sum(module.losses[:8]),
        "together": sizes.count(2),
        "weights": flat(module),
        "left": left_behind(),
    }


def fit_two(folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """Let two peers train together; return what each has seen."""
    first = call(fit, peer=0, folder=str(folder), **arguments)
    second = call(fit, env=first.invitation(), peer=1, folder=str(folder), **arguments)
    return [child.result(120) for child in (first, second)]


@pytest.mark.parametrize("way", WAYS)
def test_two_peers_train_on_one_gpu(way: str, tmp_path: Path) -> None:
    settings, precision = WAYS[way]
    peers = fit_two(tmp_path, settings=settings, precision=precision)
    offloaded = "offload_optimizer" in settings or "delay_grad_averaging" in settings
    for peer in peers:
        assert peer["module"] == peer["chosen"]
        assert peer["optimizer"] == ("cpu" if offloaded else peer["chosen"])
        assert peer["scaler"] is (True if precision == "16-mixed" else None)
        assert peer["together"] >= ROUNDS / 2
        assert peer["fell"] < 0.9
        assert peer["left"] == NOTHING
    difference = max(abs(a - b) for a, b in zip(*(p["weights"] for p in peers), strict=True))
    assert difference <= 1e-4 * max(abs(weight) for weight in peers[0]["weights"])
