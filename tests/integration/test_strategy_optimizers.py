"""The optimizer in one fit on one real peer: schedulers, buffers, re-creation."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import ALONE, Regression, UntilRound, fit_alone, loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]


def schedulers_advance_with_rounds() -> dict[str, Any]:
    import torch
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger
    from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ExponentialLR

    from rayhive.strategy.strategy import HiveMindScheduler

    class Scheduled(Regression):
        def __init__(self, **config: Any) -> None:
            super().__init__()
            self.config = config
            self.calls = 0

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            config = {**self.config, "scheduler": self.config["scheduler"](optimizer)}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls += 1
            super().lr_scheduler_step(scheduler, metric)

    monitored: list[str] = []

    def rates(
        config: dict[str, Any], options: dict[str, Any] | None = None, **strategy: Any
    ) -> list[float]:
        from rayhive import HivemindStrategy

        seen = []

        def at_round(trainer: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])
            for shown in trainer.lr_scheduler_configs:
                assert isinstance(shown.scheduler, HiveMindScheduler)
                assert shown.scheduler.get_last_lr()[0] == seen[-1]

        # short epochs: a scheduler that stepped with them would be seen to
        module = Scheduled(**config)
        callbacks = [UntilRound(4, at_round), *(options or {}).pop("callbacks", [])]
        trainer = make_trainer(HivemindStrategy(**ALONE, **strategy), *callbacks, **(options or {}))
        trainer.fit(module, loader(samples=96))
        assert module.calls == 4, module.calls
        monitored.extend(trainer.callback_metrics)
        return seen

    def half(optimizer: Any) -> Any:
        return ExponentialLR(optimizer, 0.5)

    def restarts(optimizer: Any) -> Any:
        return CosineAnnealingWarmRestarts(optimizer, 2)  # counts its steps in a way of its own

    watched = {
        "callbacks": [LearningRateMonitor(logging_interval="step")],
        "logger": CSVLogger("."),
        "log_every_n_steps": 1,
    }
    step = {"scheduler": half, "interval": "step", "frequency": 3, "name": "rate"}
    return {
        "epoch": rates({"scheduler": half}),
        "step": rates(step, watched),
        "restarts": rates({"scheduler": restarts, "interval": "step"}),
        "scheduler_fn": rates({"scheduler": restarts}, scheduler_fn=half),
        "scheduler_fn, offloaded": rates(
            {"scheduler": restarts}, scheduler_fn=half, offload_optimizer=True
        ),
        "monitor": monitored,
    }


def test_schedulers_advance_exactly_once_a_round() -> None:
    result = call(schedulers_advance_with_rounds).result()
    halves = pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    assert result["epoch"] == halves
    assert result["step"] == halves
    assert result["restarts"] == pytest.approx([0.05, 0.1, 0.05, 0.1])
    assert result["scheduler_fn"] == halves
    assert result["scheduler_fn, offloaded"] == halves
    assert result["monitor"] == ["rate"]


def reused_buffers() -> dict[str, Any]:
    import warnings

    class Overridden(Regression):
        def optimizer_zero_grad(self, *args: Any) -> None:
            raise AssertionError("called")

        def on_train_batch_end(self, *args: Any) -> None:
            self.zero_grad()
            if self.fail:
                raise ZeroDivisionError

    module = Overridden()
    before = dict(vars(module))
    module.fail = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_alone({"reuse_grad_buffers": True}, module, rounds=2)
    restored = not vars(module).keys() & {"zero_grad", "optimizer_zero_grad"}
    module.fail = True
    with contextlib.suppress(ZeroDivisionError):
        fit_alone({"reuse_grad_buffers": True}, module, rounds=2)
    return {
        "warned": any(
            "You have overridden `optimizer_zero_grad`" in str(w.message) for w in caught
        ),
        "restored": restored,
        "restored after an error": not vars(module).keys() & {"zero_grad", "optimizer_zero_grad"},
        "moved": bool(before) and module.losses[-1] < module.losses[0],
    }


def test_reused_buffers_are_kept_from_the_module_until_the_end() -> None:
    result = call(reused_buffers).result()
    assert result == {
        "warned": True,
        "restored": True,
        "restored after an error": True,
        "moved": True,
    }


def frozen_and_recreated() -> dict[str, Any]:
    import torch

    module = Regression(
        optimizer=lambda parameters: torch.optim.AdamW(
            [
                {"params": list(module.net[0].parameters()), "lr": 0.02},
                {"params": list(module.net[2].parameters()), "weight_decay": 0.5},
            ],
            lr=0.01,
            betas=(0.8, 0.9),
        )
    )
    module.net[0].bias.requires_grad_(False)
    frozen = module.net[0].bias.detach().clone()
    steps: list[Any] = []

    def at_round(trainer: Any) -> None:
        inner = trainer.optimizers[0].opt
        steps.append(float(inner.state[inner.param_groups[0]["params"][0]]["step"]))

    trainer = fit_alone({"offload_optimizer": True}, module, rounds=2, at_round=at_round)
    inner = trainer.optimizers[0].opt
    return {
        "class": type(inner).__name__,
        "groups": [
            {k: v for k, v in group.items() if k in ("lr", "weight_decay", "betas")}
            for group in inner.param_groups
        ],
        "sizes": [len(group["params"]) for group in inner.param_groups],
        "frozen": bool((module.net[0].bias == frozen).all()),
        "steps": steps,
    }


def test_a_recreated_optimizer_differs_only_in_its_tensors() -> None:
    result = call(frozen_and_recreated).result()
    assert result["class"] == "AdamW"
    assert result["groups"] == [
        {"lr": 0.02, "weight_decay": 0.01, "betas": [0.8, 0.9]},
        {"lr": 0.01, "weight_decay": 0.5, "betas": [0.8, 0.9]},
    ]
    assert result["sizes"] == [1, 2]  # the frozen one is left alone
    assert result["frozen"]
    assert result["steps"] == [1.0, 2.0]
