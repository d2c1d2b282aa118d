"""Evaluation of users' own modules: which loss counts, on which samples and by which steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhive.errors import ConfigError
from rayhive.workloads.loading import load_workload

SOURCE = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


def loader(values, batch_size=2):
    return DataLoader(TensorDataset(torch.tensor(values)), batch_size=batch_size)


class Base(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0][:, None]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return loader([1.0] * 20)

    def val_dataloader(self):
        return loader([1.0, 2.0, 6.0])


class LogsAndReturns(Base):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0].mean())
        return 100 * batch[0].mean()


class LogsAndReturnsBoth(Base):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0].mean())
        return {"loss": 100 * batch[0].mean(), "val_loss": batch[0].mean() - 1, "x": 5}


class ReturnsPredictions(Base):
    def val_dataloader(self):
        return loader([1.0, 2.0, 6.0], batch_size=1)

    def validation_step(self, batch, batch_idx):
        return batch[0]


class ReturnsLoss(Base):
    def validation_step(self, batch, batch_idx):
        return batch[0].mean()


class Two(Base):
    def val_dataloader(self):
        return [loader([1.0, 2.0, 6.0]), loader([10.0])]


class TwoReturned(Two):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0].mean()


class TwoReturnedByName(Two):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return {"error": batch[0].mean()}


class TwoLogged(Two):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", batch[0].mean())
        if dataloader_idx == 1:
            self.log("far", batch[0].mean())


class TwoTrained(Two):
    def training_step(self, batch, batch_idx):
        return batch[0].mean() + 0 * self.layer.weight.sum()


class Opaque:
    def __init__(self, samples):
        self.values = torch.stack([each[0] for each in samples])


class TwoOpaque(Base):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(20)), batch_size=2, collate_fn=Opaque)

    def training_step(self, batch, batch_idx):
        return self.layer(batch.values[:, None]).square().mean()

    def val_dataloader(self):
        sets = ([1.0, 2.0, 6.0], [10.0])
        data = [TensorDataset(torch.tensor(values)) for values in sets]
        return [DataLoader(each, batch_size=2, collate_fn=Opaque) for each in data]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return batch.values.mean()


class WithoutIndex(Base):
    def training_step(self, batch):
        return batch[0].mean() + 0 * self.layer.weight.sum()


class ValidatedWithoutIndex(WithoutIndex):
    def validation_step(self, batch):
        self.log("val_loss", self.training_step(batch))


class OtherIndex(Base):
    def training_step(self, samples, number):
        return samples[0].mean() + 0 * number + 0 * self.layer.weight.sum()


class SetUp(Base):
    calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append("setup")
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def teardown(self, stage):
        self.calls.append("teardown")
        self.layer = None

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0][:, None]).mean())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, as a user has it beside the study."""
    (tmp_path / "evaluated.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("evaluated", None)


def measured(name: str) -> dict[str, float]:
    """Return the metrics of a fresh module that passed the check."""
    workload = load_workload(None, f"evaluated:{name}")
    workload.check()
    values = workload.evaluate(workload.module(seed=0))
    assert set(values) == set(workload.metrics())
    return values


def test_a_logged_loss_counts_before_a_returned_one() -> None:
    assert measured("LogsAndReturns") == {"loss": 3.0, "val_loss": 3.0}
    assert measured("LogsAndReturnsBoth") == {"loss": 3.0, "val_loss": 3.0, "x": 5.0}


def test_a_returned_scalar_is_the_loss_if_none_is_logged() -> None:
    assert measured("ReturnsLoss") == {"loss": 3.0}


def test_returned_predictions_are_no_loss() -> None:
    with pytest.raises(ConfigError, match="logs its loss as val_loss; it gives nothing"):
        load_workload(None, "evaluated:ReturnsPredictions").check()


@pytest.mark.parametrize("name", ["TwoReturned", "TwoTrained"])
def test_the_returned_loss_of_several_loaders_is_the_mean_over_their_samples(name: str) -> None:
    assert measured(name) == {"loss": pytest.approx((1 + 2 + 6 + 10) / 4)}


def test_the_only_returned_number_of_several_loaders_is_the_loss() -> None:
    expected = pytest.approx((1 + 2 + 6 + 10) / 4)
    assert measured("TwoReturnedByName") == {"loss": expected, "error": expected}


def test_a_logged_loss_of_several_loaders_is_the_mean_over_their_samples() -> None:
    expected = pytest.approx((1 + 2 + 6 + 10) / 4)
    assert measured("TwoLogged") == {
        "loss": expected,
        "val_loss": expected,
        "val_loss/dataloader_idx_0": 3.0,
        "val_loss/dataloader_idx_1": 10.0,
        "far": 10.0,
        "far/dataloader_idx_1": 10.0,
    }


def test_batches_whose_size_is_unknown_weigh_the_same() -> None:
    # batches of loader 0: 1.5 and 6; of loader 1: 10
    assert measured("TwoOpaque") == {"loss": pytest.approx((1.5 + 6 + 10) / 3)}


@pytest.mark.parametrize("name", ["WithoutIndex", "OtherIndex"])
def test_a_training_step_needs_no_batch_idx(name: str) -> None:
    assert measured(name) == {"loss": 3.0}


def test_a_validation_step_needs_no_batch_idx() -> None:
    assert measured("ValidatedWithoutIndex") == {"loss": 3.0, "val_loss": 3.0}


def test_an_evaluation_leaves_the_parameters_and_runs_no_set_up() -> None:
    workload: Any = load_workload(None, "evaluated:SetUp")
    module = workload.module(seed=0)
    module.setup("fit")
    torch.nn.init.constant_(module.layer.weight, 2.0)  # trained
    workload.evaluate(module)
    calls = len(module.calls)
    assert workload.evaluate(module)["loss"] == 2 * 3.0
    assert len(module.calls) == calls
