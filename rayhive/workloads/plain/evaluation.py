"""Evaluation of a plain module on held-out samples, by a Lightning trainer."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

#: Names under which modules log their loss on held-out samples, the most specific first.
LOSS_NAMES = ("loss", "val_loss", "validation_loss", "valid_loss", "val/loss", "eval_loss")
_RETURNED = "returned by validation_step: "


def quiet_trainer(device: torch.device, **arguments: Any) -> Trainer:
    """Return a trainer on one device that writes and prints nothing."""
    gpu = device.type == "cuda"
    with silent():
        return Trainer(
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


class Returned(Callback):
    """Logs the numbers that ``validation_step`` returns as Lightning logs those of ``self.log``."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the numbers of one batch."""
        values = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        for name, value in values.items():
            if isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1
            ):
                pl_module.log(f"{_RETURNED}{name}", float(value), add_dataloader_idx=False)


def validates_by_training_step(module: LightningModule) -> bool:
    """Return whether a module has no ``validation_step``; give it one that uses its loss.

    The step returns the result of ``training_step``, which runs in evaluation mode.
    """
    if is_overridden("validation_step", module):
        return False

    def validation_step(self: LightningModule, batch: Any, batch_idx: int) -> Any:
        found = self.training_step(batch, batch_idx)
        return found["loss"] if isinstance(found, Mapping) else found

    module.validation_step = types.MethodType(validation_step, module)  # type: ignore[method-assign]
    return True


def evaluating_trainer(device: torch.device, **limit: Any) -> Trainer:
    """Return a trainer for :func:`measure`.

    Args:
        device: Device of the modules.
        **limit: Limit of the trainer, for example ``limit_val_batches``.
    """
    return quiet_trainer(device, callbacks=[Returned()], **limit)


def measure(module: LightningModule, loaders: Any, trainer: Trainer) -> dict[str, float]:
    """Return the metrics that a module logs or returns in ``validation_step``, means by default.

    Args:
        module: The module; its trainer is replaced.
        loaders: The held-out samples.
        trainer: A trainer of :func:`evaluating_trainer`; it can be used again.

    Returns:
        Name -> value. A returned number has the name that it is returned under, or ``loss``; of a
        name that is also logged, the logged value counts.
    """
    with silent():
        trainer.validate(module, loaders, verbose=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    logged = {name: value for name, value in found.items() if not name.startswith(_RETURNED)}
    returned = {n.removeprefix(_RETURNED): v for n, v in found.items() if n not in logged}
    values = {**returned, **logged}
    loss = next((name for name in LOSS_NAMES if name in values), None)
    if loss is None and len(returned) == 1:
        loss = next(iter(returned))
    return values if loss is None else {"loss": values[loss], **values}
