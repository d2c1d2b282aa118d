"""Checkpoints: training resumes from the saved state, in swarms of one and of two peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, LOOPBACK, Regression, Together, UntilRound, flat, loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"offload_optimizer": True},
    "delayed": {"delay_state_averaging": True, "delay_grad_averaging": True},
}


def _strategy(way: str, **options: Any) -> Any:
    import torch

    from rayhive import HivemindStrategy

    settings = dict(WAYS[way])
    if way != "plain":  # the optimizer is re-created, and its scheduler with it
        settings["scheduler_fn"] = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(
            optimizer, 0.8
        )
    return HivemindStrategy(
        **{**FAST, "target_batch_size": 64, "host_maddrs": LOOPBACK, **settings, **options}
    )


def _module(way: str) -> Regression:
    import torch

    def adam(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01)

    if way != "plain":
        return Regression(optimizer=adam)
    return Regression(
        optimizer=adam,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    )


def _same_batches() -> Any:
    """Return a loader of equal batches, so that the place of resumption does not matter."""
    from torch.utils.data import DataLoader, TensorDataset

    inputs, targets = next(iter(loader()))
    return DataLoader(TensorDataset(inputs.repeat(1000, 1), targets.repeat(1000, 1)), batch_size=16)


def _state(trainer: Any) -> dict[str, Any]:
    """Return all that a peer has to have kept."""
    optimizer = trainer.optimizers[0]
    inner = optimizer.opt
    parameters = [p for group in inner.param_groups for p in group["params"]]
    return {
        "round": optimizer.local_epoch,
        "swarm's round": optimizer.tracker.global_epoch,
        "weights": flat(trainer.lightning_module),
        "optimizer's weights": [v for p in parameters for v in p.detach().reshape(-1).tolist()],
        "moments": [
            v for p in parameters for v in inner.state[p]["exp_avg_sq"].reshape(-1).tolist()
        ],
        "steps": [float(inner.state[p]["step"]) for p in parameters],
        "rate": optimizer.param_groups[0]["lr"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    }


def save(way: str, folder: str) -> dict[str, Any]:
    """Trains six rounds, with checkpoints after the third and at the end."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saved: dict[str, Any] = {}

    class Saving(UntilRound):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if self.seen == 3 and not saved:
                trainer.save_checkpoint(Path(folder) / "third.ckpt")
                saved.update(_state(trainer))

    regular = ModelCheckpoint(folder, "regular-{step}", every_n_train_steps=12, save_top_k=-1)
    trainer = make_trainer(_strategy(way), Saving(6), regular, enable_checkpointing=True)
    trainer.fit(_module(way), _same_batches())
    trainer.save_checkpoint(Path(folder) / "last.ckpt")
    return {
        "third": saved,
        "last": _state(trainer),
        "files": sorted(path.name for path in Path(folder).glob("*.ckpt")),
    }


def resume(
    way: str, checkpoint: str, rounds: int, module: Regression | None = None
) -> dict[str, Any]:
    restored: dict[str, Any] = {}

    class Looking(UntilRound):
        def at_start(self, trainer: Any) -> None:
            restored.update(_state(trainer))

    trainer = make_trainer(_strategy(way), Looking(rounds))
    trainer.fit(module or _module(way), _same_batches(), ckpt_path=checkpoint)
    return {"restored": restored, "last": _state(trainer)}


def _close(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    "way", ["plain", "delayed", pytest.param("offload", marks=pytest.mark.slow)]
)
def test_training_goes_on_from_a_checkpoint(way: str, tmp_path: Path) -> None:
    saved = call(save, way=way, folder=str(tmp_path)).result()
    assert saved["third"]["round"] == saved["third"]["schedule"] == 3
    assert saved["third"]["steps"] == [3.0] * 4
    assert saved["third"]["rate"] == pytest.approx(0.01 * 0.8**3)
    assert {"last.ckpt", "third.ckpt", "regular-step=12.ckpt"} <= set(saved["files"])

    resumed = call(resume, way=way, checkpoint=str(tmp_path / "third.ckpt"), rounds=6).result()
    _close(resumed["restored"], saved["third"])
    assert resumed["last"]["round"] == 6
    assert resumed["last"]["steps"] == [6.0] * 4
    if way != "delayed":  # how stale a gradient is depends on the time that the background takes
        _close(resumed["last"], saved["last"])


def without_a_swarm(folder: str, frozen: bool) -> dict[str, Any]:
    """Takes a checkpoint of plain Lightning along, and brings one back to it."""

    def module() -> Regression:
        made = _module("plain")
        [*made.parameters()][1].requires_grad_(not frozen)
        return made

    plain, swarm = str(Path(folder) / "plain.ckpt"), str(Path(folder) / "swarm.ckpt")
    trainer = make_trainer("auto", max_steps=5)
    trainer.fit(module(), _same_batches())
    trainer.save_checkpoint(plain)
    first = resume("plain", plain, rounds=2, module=module())
    trainer = make_trainer(_strategy("plain"), UntilRound(2))
    trainer.fit(module(), _same_batches())
    trainer.save_checkpoint(swarm)
    trainer = make_trainer("auto", max_steps=trainer.global_step + 3)
    trainer.fit(module(), _same_batches(), ckpt_path=swarm)
    inner = trainer.optimizers[0]
    steps = [float(inner.state[p].get("step", 0)) for p in inner.param_groups[0]["params"]]
    return {"from plain": first["restored"], "to plain": steps}


@pytest.mark.parametrize("frozen", [False, True])
def test_plain_checkpoints_come_and_go(frozen: bool, tmp_path: Path) -> None:
    result = call(without_a_swarm, folder=str(tmp_path), frozen=frozen).result()
    assert result["from plain"]["round"] == 0
    assert result["from plain"]["steps"] == [5.0] * (3 if frozen else 4)
    # two rounds and three batches
    assert result["to plain"] == ([5.0, 0.0, 5.0, 5.0] if frozen else [5.0] * 4)


def rejoin(way: str, peer: int, folder: str, checkpoint: str | None) -> dict[str, Any]:
    class Looking(Together):
        def at_start(self, trainer: Any) -> None:
            self.start = _state(trainer)
            super().at_start(trainer)

    callback = Looking(folder, peer, rounds=6)
    trainer = make_trainer(_strategy(way), callback)
    trainer.fit(_module(way), loader(seed=peer), ckpt_path=checkpoint)
    return {"start": callback.start, "last": _state(trainer), "peers": callback.most_peers}


def test_a_newcomer_takes_over_what_another_resumed(tmp_path: Path) -> None:
    call(save, way="offload", folder=str(tmp_path)).result()
    options = {"way": "offload", "folder": str(tmp_path)}
    first = call(rejoin, **options, peer=0, checkpoint=str(tmp_path / "third.ckpt"))
    invitation = first.invitation()
    # it may only join when there is something to join
    first.wait_for_line("Restored all states")
    second = call(rejoin, env=invitation, **options, peer=1, checkpoint=None)
    results = [first.result(), second.result()]
    for result in results:
        assert result["start"]["round"] == 3
        assert result["start"]["steps"] == [3.0] * 4
        assert result["start"]["rate"] == pytest.approx(0.01 * 0.8**3)
        assert result["last"]["round"] == 6
        assert result["last"]["rate"] == pytest.approx(0.01 * 0.8**6)
        assert result["peers"] == 2
    assert results[0]["last"]["weights"] == pytest.approx(results[1]["last"]["weights"], abs=1e-5)
