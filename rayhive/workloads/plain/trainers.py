"""Lightning trainers that try, set up and measure a user's module."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from rayhive.workloads.plain.user_code import LengthError

#: Attributes of a trainer that depend on the length of a run.
LENGTHS = ("max_epochs", "max_steps", "num_training_batches", "estimated_stepping_batches")


@contextmanager
def silent() -> Iterator[None]:
    """Drop advice that does not apply to a measurement, such as more workers for a loader."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def quiet_trainer(device: torch.device, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    """Return a trainer on one device that writes and prints nothing.

    Args:
        device: The device.
        kind: Class of the trainer.
        **arguments: Further arguments of the trainer.
    """
    gpu = device.type == "cuda"
    with silent():
        return kind(
            accelerator="gpu" if gpu else "cpu",
            devices=[device.index or 0] if gpu else 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            plugins=[LightningEnvironment()],
            **arguments,
        )


class TrainerWithoutLength(Trainer):
    """Trainer of a module that is set up, but not trained; its length cannot be read.

    The trainer of a peer has no length either: a callback stops it when the budget is spent. What
    Lightning answers then (-1, None or infinity) would make a useless schedule.
    """

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute.

        Raises:
            LengthError: The attribute depends on the length of the run.
        """
        if name in LENGTHS:
            raise LengthError(name)
        return super().__getattribute__(name)
