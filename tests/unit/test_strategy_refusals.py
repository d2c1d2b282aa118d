"""Trainers and modules that cannot train in a swarm are refused before a swarm is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from rayhive.strategy.strategy import HivemindStrategy, StrategyError


class Module(pl.LightningModule):
    """Module with a given optimizer configuration."""

    def __init__(self, configure: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.configure = configure or (lambda parameters: SGD(parameters, lr=0.1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


@pytest.fixture(autouse=True)
def swarm() -> Iterator[mock.Mock]:
    """Fail if a swarm's optimizer is made; no DHT is started either."""
    with (
        mock.patch("hivemind.DHT", autospec=True),
        mock.patch("rayhive.strategy.session.RayhiveOptimizer") as made,
    ):
        yield made


def refused(
    swarm: mock.Mock,
    module: pl.LightningModule | None = None,
    strategy: dict[str, Any] | None = None,
    **trainer: Any,
) -> StrategyError:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "max_epochs": 1,
        "enable_model_summary": False,
    }
    data = DataLoader(TensorDataset(torch.ones(4, 2)))
    with pytest.raises(StrategyError) as caught:
        pl.Trainer(strategy=HivemindStrategy(8, **(strategy or {})), **{**settings, **trainer}).fit(
            module or Module(), data
        )
    swarm.assert_not_called()
    return caught.value


def scheduled(parameters: Any) -> Any:
    optimizer = SGD(parameters, lr=0.1)
    return [optimizer], [ExponentialLR(optimizer, gamma=0.5)]


def test_accumulation_by_lightning(swarm: mock.Mock) -> None:
    assert "accumulate_grad_batches" in str(refused(swarm, accumulate_grad_batches=2))
    callback = GradientAccumulationScheduler({1: 2})
    assert "accumulate_grad_batches" in str(refused(swarm, callbacks=[callback]))


def test_several_devices_and_nodes(swarm: mock.Mock) -> None:
    assert "devices=1" in str(refused(swarm, devices=2))
    error = refused(swarm, num_nodes=2, accumulate_grad_batches=2)
    assert {problem.key for problem in error.problems} == {"num_nodes", "accumulate_grad_batches"}


def test_several_optimizers(swarm: mock.Mock) -> None:
    def two(parameters: Any) -> list[Optimizer]:
        parameters = list(parameters)
        return [SGD(parameters, lr=0.1), SGD(parameters, lr=0.1)]

    manual = Module(two)
    manual.automatic_optimization = False
    for module in (Module(two), manual):
        error = refused(swarm, module)
        assert "Hivemind only supports training with one optimizer." in str(error)
    assert "parameters" in str(refused(swarm, Module(lambda parameters: None)))


@pytest.mark.parametrize("flags", [{}, {"offload_optimizer": True}])
def test_a_plateau(swarm: mock.Mock, flags: dict[str, Any]) -> None:
    def configure(parameters: Any) -> Any:
        optimizer = SGD(parameters, lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"},
        }

    error = refused(swarm, Module(configure), flags)
    assert "`ReduceLROnPlateau` scheduler is not supported with `HivemindStrategy`" in str(error)


@pytest.mark.parametrize(
    "flags",
    [
        {"offload_optimizer": True},
        {"delay_state_averaging": True},
        {"delay_state_averaging": True, "delay_grad_averaging": True},
    ],
)
def test_a_scheduler_that_would_be_dropped(swarm: mock.Mock, flags: dict[str, Any]) -> None:
    error = refused(swarm, Module(scheduled), flags)
    assert [problem.key for problem in error.problems] == ["scheduler_fn"]
    assert "requires a `scheduler_fn` to be passed to the strategy" in str(error)
    assert "ExponentialLR" in str(error)


def test_a_scheduler_of_another_optimizer(swarm: mock.Mock) -> None:
    ready_made = ExponentialLR(SGD(Module().parameters(), lr=0.1), gamma=0.5)
    for flags in ({}, {"offload_optimizer": True}):
        error = refused(swarm, None, {**flags, "scheduler_fn": ready_made})
        assert "callable(optimizer) -> scheduler" in str(error)


def test_a_recreated_optimizer_without_a_scheduler_is_only_warned_of(swarm: mock.Mock) -> None:
    swarm.side_effect = RuntimeError("far enough")
    strategy = HivemindStrategy(8, delay_state_averaging=True)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, max_epochs=1)
    with (
        pytest.warns(UserWarning, match="requires a `scheduler_fn` to be passed to the strategy"),
        pytest.raises(RuntimeError, match="far enough"),
    ):
        trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(4, 2))))
    assert swarm.call_args.kwargs["offload_optimizer"] is True
    assert swarm.call_args.kwargs["params"][0]["lr"] == 0.1


def test_complex_parameters_are_refused(swarm: mock.Mock) -> None:
    """Their imaginary parts were lost without a word."""
    module = Module()
    module.waves = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    error = refused(swarm, module)
    assert [problem.key for problem in error.problems] == ["configure_optimizers"]
    assert "torch.view_as_real" in str(error)


def test_extra_tensors_of_another_device(swarm: mock.Mock) -> None:
    astray = torch.empty(1, device="meta")
    error = refused(swarm, None, {"extra_tensors": [astray]})
    assert "lambda module" in str(error)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ([torch.ones(2, dtype=torch.complex64)], "torch.complex64"),
        (lambda _: [1.5], "a float"),
        (lambda module: module.state_dict(), "a str"),
    ],
)
def test_extra_tensors_that_cannot_be_averaged(swarm: mock.Mock, extra: Any, told: str) -> None:
    error = refused(swarm, None, {"extra_tensors": extra})
    assert [problem.key for problem in error.problems] == ["extra_tensors"]
    assert told in str(error)


def test_a_trainer_that_only_evaluates_is_accepted() -> None:
    class Evaluated(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", 1.0)

    strategy = HivemindStrategy(8)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, accumulate_grad_batches=2
    )
    result = trainer.validate(Evaluated(), DataLoader(TensorDataset(torch.ones(4, 2))))
    assert result == [{"seen": 1.0}]
    strategy.dht.shutdown.assert_not_called()
    with pytest.raises(RuntimeError, match="setup of a fit"):
        strategy.optimizer  # noqa: B018
    assert strategy.num_peers == 1
    assert strategy.is_global_zero
    assert strategy.global_rank == 0


def test_each_trainer_of_a_strategy_sets_its_own_device_and_precision() -> None:
    strategy = HivemindStrategy(8)
    assert strategy.root_device == torch.device("cpu")
    first = pl.Trainer(strategy=strategy, accelerator="cpu", precision="bf16-mixed", logger=False)
    assert first.precision == "bf16-mixed"
    second = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False)
    assert second.precision == "32-true"
    assert strategy.precision_plugin is second.precision_plugin


@pytest.mark.parametrize(("given", "rank"), [(True, 0), (False, 1)])
def test_global_zero_can_be_chosen(given: bool, rank: int) -> None:
    strategy = HivemindStrategy(8, global_zero=given)
    assert (strategy.is_global_zero, strategy.global_rank) == (given, rank)
