"""Evaluation of a plain module on held-out samples, by a Lightning trainer."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from rayhive.workloads.plain.trainers import quiet_trainer, silent

#: Names under which modules log their loss on held-out samples, the most specific first.
LOSS_NAMES = ("loss", "val_loss", "validation_loss", "valid_loss", "val/loss", "eval_loss")
_RETURNED = "returned by validation_step: "
_SAMPLES = "samples of the loader"
#: Lightning's mark, in a name, of the number of one of several validation loaders.
_OF_LOADER = "/dataloader_idx_"


class Returned(Callback):
    """Logs the numbers that ``validation_step`` returns as Lightning logs those of ``self.log``.

    Of several loaders, each one's number of samples is logged too.
    """

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int | None = None,
    ) -> None:
        """Log the numbers of one batch."""
        size = _batch_size(batch)
        for name, value in _numbers(outputs).items():
            pl_module.log(f"{_RETURNED}{name}", value, batch_size=size)
        if dataloader_idx is not None:  # Lightning gives it only with several loaders
            pl_module.log(_SAMPLES, float(size), reduce_fx="sum", batch_size=size)


def _numbers(outputs: Any) -> dict[str, float]:
    """Return the scalars in a result of ``validation_step``; a tensor of predictions is none."""
    if isinstance(outputs, Mapping):
        return {
            name: float(value)
            for name, value in outputs.items()
            if isinstance(value, (int, float)) or _is_scalar(value)
        }
    return {"loss": float(outputs)} if isinstance(outputs, float) or _is_scalar(outputs) else {}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _batch_size(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if Lightning cannot tell."""
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        return 1


def validates_by_training_step(module: LightningModule) -> bool:
    """Return whether a module has no ``validation_step``; give it one that uses its loss.

    The step returns the loss of ``training_step``, which runs in evaluation mode.
    """
    if is_overridden("validation_step", module):
        return False
    # As Lightning does: the index is optional, and can have any name.
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def validation_step(
        self: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        found = self.training_step(*((batch, batch_idx) if numbered else (batch,)))
        loss = found["loss"] if isinstance(found, Mapping) else found
        return loss.squeeze() if isinstance(loss, torch.Tensor) else loss

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
        name that is also logged, the logged value counts. With several loaders, a name stands for
        the mean over the samples of all, and logged values of each loader have Lightning's name.
        ``loss`` is the logged loss, else the returned one.
    """
    with silent():
        trainer.validate(module, loaders, verbose=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    samples = {
        name.removeprefix(f"{_SAMPLES}{_OF_LOADER}"): found.pop(name)
        for name in list(found)
        if name.startswith(_SAMPLES)
    }
    logged = {name: value for name, value in found.items() if not name.startswith(_RETURNED)}
    returned = {n.removeprefix(_RETURNED): v for n, v in found.items() if n not in logged}
    logged = {**_over_loaders(logged, samples), **logged}
    returned = _over_loaders(returned, samples)
    losses = [group[name] for group in (logged, returned) for name in LOSS_NAMES if name in group]
    if not losses and len(returned) == 1:
        losses = list(returned.values())
    values = {**returned, **logged}
    return {**values, "loss": losses[0]} if losses else values


def _over_loaders(values: Mapping[str, float], samples: Mapping[str, float]) -> dict[str, float]:
    """Return values without those of single loaders, but with the means over all loaders.

    Args:
        values: Name -> value.
        samples: Number of a loader -> its samples, by which it is weighted.
    """
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, value in values.items():
        base, _, loader = name.partition(_OF_LOADER)
        if loader in samples:
            parts.setdefault(base, []).append((value, samples[loader]))
        else:
            parts[name] = [(value, 1.0)]
    return {
        name: sum(value * weight for value, weight in found) / sum(weight for _, weight in found)
        for name, found in parts.items()
    }
