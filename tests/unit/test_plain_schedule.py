"""Learning-rate schedules of users' own modules, tried before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.errors import ConfigError
from rayhive.workloads.loading import load_workload

SOURCE = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset


class Base(LightningModule):
    def __init__(self, rounds=100):
        super().__init__()
        self.layer, self.rounds = torch.nn.Linear(1, 1), rounds

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0][:, None]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = self.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(20)), batch_size=2)


class Estimated(Base):
    def schedule(self, optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)


class Epochs(Base):
    def schedule(self, optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)


class Steps(Base):
    def schedule(self, optimizer):
        length = getattr(self.trainer, "max_steps", 10)
        return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))


class Batches(Base):
    def schedule(self, optimizer):
        length = self.trainer.num_training_batches
        return lr_scheduler.LinearLR(optimizer, 0.1, total_iters=length)


class InSetup(Base):
    def setup(self, stage):
        self.rounds = 10 * self.trainer.max_epochs

    def schedule(self, optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, self.rounds)


class Given(Base):
    def schedule(self, optimizer):
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.rounds)


class NotANumber(Base):
    def schedule(self, optimizer):
        rate = lambda step: 1.0 if step == 0 else float("nan")
        return lr_scheduler.LambdaLR(optimizer, rate)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, as a user has it beside the study."""
    (tmp_path / "scheduled.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("scheduled", None)


def refusal(name: str, *, data: str | None = None, **args: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load_workload(None, f"scheduled:{name}", args, data=data).check()
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("workload.import", f"scheduled:{name}")
    return problem.allowed


@pytest.mark.parametrize(
    ("name", "hook", "asked"),
    [
        ("Estimated", "configure_optimizers", "estimated_stepping_batches"),
        ("Epochs", "configure_optimizers", "max_epochs"),
        ("Steps", "configure_optimizers", "max_steps"),
        ("Batches", "configure_optimizers", "num_training_batches"),
        ("InSetup", "setup", "max_epochs"),
    ],
)
def test_a_schedule_that_asks_the_trainer_for_its_length_is_refused(
    name: str, hook: str, asked: str
) -> None:
    allowed = refusal(name)
    assert f"a module whose {hook} does not read trainer.{asked} (scheduled.py, line " in allowed
    assert "the budget of the study ends a run" in allowed
    assert "give the number of rounds as an argument of its constructor (workload.args" in allowed


def test_the_module_is_named_that_asks_for_a_length_beside_a_data_module() -> None:
    assert "whose setup does not read trainer.max_epochs" in refusal(
        "InSetup", data="scheduled:BoringDataModule"
    )


def test_a_schedule_of_a_given_length_passes_and_starts_where_it_began() -> None:
    workload = load_workload(None, "scheduled:Given", {"rounds": 60})
    workload.check()
    make = workload.scheduler_fn()
    assert make is not None
    module = workload.module(seed=0)
    scheduler = make(module.configure_optimizers()["optimizer"])
    assert scheduler.last_epoch == 0


def test_a_schedule_that_breaks_is_found_before_anything_starts() -> None:
    assert "schedule of the learning rate works; it raised ValueError" in refusal("Given", rounds=2)
    assert "whose rates are finite; step 1 gives nan" in refusal("NotANumber")
