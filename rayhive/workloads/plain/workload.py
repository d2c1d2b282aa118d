"""Workload of a plain Lightning module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from rayhive.errors import ConfigError, Problem
from rayhive.files import in_turn
from rayhive.workloads.base import Device, SchedulerFn, Target, Workload, trained_shapes
from rayhive.workloads.plain.evaluation import (
    evaluating_trainer,
    measure,
    validates_by_training_step,
)
from rayhive.workloads.plain.schedule import first_rates, only_scheduler, remade
from rayhive.workloads.plain.shards import TrainingData
from rayhive.workloads.plain.trainers import TrainerWithoutLength, quiet_trainer, silent
from rayhive.workloads.plain.user_code import calling, same_random_numbers

_KEY, _DATA_KEY = "workload.import", "workload.data"
#: Seed of the data: the same in all replicates, whose parameters differ.
_DATA_SEED = 0
_CPU = torch.device("cpu")
#: Steps of a scheduler that are tried: few, because a short run may have a short schedule.
_TRIED_STEPS = 3
#: Buffers of torch's normalisations that change in training.
_STATISTICS = ("running_mean", "running_var")
#: Hooks that Lightning takes from a data module only if the trainer was given that module.
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class PlainModule(Workload):
    """Workload of a user's ``LightningModule``, with its loaders or those of a data module.

    The data is built once more in every peer, with equal random numbers. A peer trains on a share
    of the training samples of its own, whatever order the loader has; the order is that of
    :class:`~rayhive.workloads.data.SampleStream`.

    Evaluation runs ``validation_step``, or without one ``training_step`` in evaluation mode, on the
    validation loaders, or without one on training samples that are held out. The module that is
    evaluated is a copy: hooks of the evaluation cannot change the one that trains.

    Args:
        make: Returns a fresh module.
        path: Import path of the module.
        target: Target; None without one.
        make_data: Returns the data module; None if the module has loaders of its own.
        data_path: Import path of the data module.

    Raises:
        ConfigError: The module or its data cannot be used; the key is ``workload.import``,
            ``workload.data`` or ``workload.target.metric``.
    """

    data = "own"

    def __init__(
        self,
        make: Callable[[], LightningModule],
        path: str,
        target: Target | None = None,
        make_data: Callable[[], LightningDataModule] | None = None,
        data_path: str | None = None,
    ) -> None:
        self._make, self._path, self.target = make, path, target
        self._owner = (_KEY, path) if data_path is None else (_DATA_KEY, data_path)
        self.name = path.rpartition(":")[2]
        #: A trainer takes longer to make than a small module to evaluate.
        self._trainers: dict[torch.device, Trainer] = {}
        with same_random_numbers(_DATA_SEED):
            self._samples, self._held_out = self._read(make_data)
        self.default_batch_size = self._samples.batch_size

    # -- data --------------------------------------------------------------------------------------

    def _read(
        self, make_data: Callable[[], LightningDataModule] | None
    ) -> tuple[TrainingData, Any]:
        """Return the training samples and the loaders of the held-out ones."""
        module = self._new(_DATA_SEED)
        parts = len(list(module.parameters()))
        if not parts:
            text = "a module whose parameters __init__ or configure_model makes; it has none"
            raise ConfigError(Problem(_KEY, self._path, text))
        owner: Any = module
        module.trainer = quiet_trainer(_CPU, TrainerWithoutLength)
        if make_data is not None:
            with calling("constructor", *self._owner):
                owner = make_data()
            owner.trainer = module.trainer
            if moved := [name for name in _TRANSFERS if is_overridden(name, owner)]:
                text = f"a data module without {', '.join(moved)}, which the module has to have"
                raise ConfigError(Problem(*self._owner, text))
        both = {owner: self._owner, module: (_KEY, self._path)}
        for each, named in both.items():
            with calling("prepare_data", *named), in_turn(Path()):
                each.prepare_data()
        for each, named in both.items():
            with calling("setup", *named):
                each.setup("fit")
        if len(list(module.parameters())) != parts:
            text = (
                "a module whose parameters __init__ or configure_model makes; those that setup "
                "makes would differ between peers"
            )
            raise ConfigError(Problem(_KEY, self._path, text))
        if not is_overridden("train_dataloader", owner):
            raise ConfigError(Problem(*self._owner, "one with a train_dataloader"))
        held_out = None
        if is_overridden("val_dataloader", owner):
            with calling("val_dataloader", *self._owner):
                held_out = owner.val_dataloader()
        with calling("train_dataloader", *self._owner):
            loader = owner.train_dataloader()
        hold_out = held_out is None or (isinstance(held_out, (list, tuple, dict)) and not held_out)
        key, value = self._owner
        samples = TrainingData.of(loader, hold_out=hold_out, key=key, value=value)
        return samples, samples.evaluated() if hold_out else held_out

    def train_size(self) -> int:
        """Return the number of training samples that are not held out."""
        return len(self._samples.train)

    def train_loader(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return the endless loader of one peer's share; see the base class."""
        return self._samples.share(peer=peer, peers=peers, batch_size=batch_size, seed=seed)

    # -- module ------------------------------------------------------------------------------------

    def _new(self, seed: int) -> LightningModule:
        with same_random_numbers(seed):
            with calling("constructor", _KEY, self._path):
                module = self._make()
            with calling("configure_model", _KEY, self._path):
                module.configure_model()
        # Lightning calls it again, which would draw other parameters on each peer.
        module.configure_model = _nothing  # type: ignore[method-assign]
        return module

    def _set_up(self) -> LightningModule:
        """Return a fresh module after ``setup``, which a trained one went through."""
        module = self._new(_DATA_SEED)
        module.trainer = quiet_trainer(_CPU, TrainerWithoutLength)
        with same_random_numbers(_DATA_SEED), calling("setup", _KEY, self._path):
            module.setup("fit")
        return module

    def module(self, seed: int) -> LightningModule:
        """Return a fresh module with the parameters of a seed."""
        return self._new(seed)

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the trained parameters; ``setup`` may freeze some."""
        return trained_shapes(self._set_up())

    def extra_tensors(self, module: LightningModule) -> list[Tensor]:
        """Return the running statistics of normalisations; other buffers are often constants."""
        return [
            buffer
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[2] in _STATISTICS
        ]

    def scheduler_fn(self) -> SchedulerFn | None:
        """Return a factory of copies of the scheduler that ``configure_optimizers`` returns.

        Raises:
            ConfigError: The module asks its trainer for the length of the run.
        """
        scheduler = self._scheduler()
        return None if scheduler is None else remade(scheduler)

    def _scheduler(self) -> LRScheduler | None:
        module = self._set_up()
        with calling("configure_optimizers", _KEY, self._path):
            found = only_scheduler(module.configure_optimizers())
        if isinstance(found, ReduceLROnPlateau) or not isinstance(found, LRScheduler):
            return None  # the strategy refuses what it cannot use
        return found

    def _check_schedule(self) -> None:
        scheduler = self._scheduler()
        if scheduler is None:
            return
        with silent(), calling("schedule of the learning rate", _KEY, self._path):
            rates = first_rates(scheduler, _TRIED_STEPS)
        for step, found in enumerate(rates):
            if not all(map(math.isfinite, found)):
                listed = ", ".join(map(str, found))
                allowed = f"a module with a schedule whose rates are finite; step {step} gives "
                raise ConfigError(Problem(_KEY, self._path, allowed + listed))

    # -- evaluation --------------------------------------------------------------------------------

    @cached_property
    def _copy(self) -> LightningModule:
        module = self._set_up()
        validates_by_training_step(module)
        # The module that trains was set up; once more would undo the parameters that are loaded.
        for hook in ("prepare_data", "setup", "teardown"):
            setattr(module, hook, _nothing)
        return module

    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Measure a module on the held-out samples; see :func:`~.evaluation.measure`."""
        where = next(module.parameters()).device if device is None else torch.device(device)
        if where not in self._trainers:
            self._trainers[where] = evaluating_trainer(where)
        return self._measured(module, where, self._trainers[where])

    def _measured(
        self, module: LightningModule, where: torch.device, trainer: Trainer
    ) -> dict[str, float]:
        with torch.no_grad():
            self._copy.to(where).load_state_dict(module.state_dict())
        with same_random_numbers(_DATA_SEED):
            values = measure(self._copy, self._held_out, trainer)
        if "loss" not in values and self.target is not None and self.target.mode == "min":
            values |= {"loss": values[self.target.metric]} if self.target.metric in values else {}
        self._check_metrics(values)
        return values

    def _check_metrics(self, names: Iterable[str]) -> None:
        known = sorted(names)
        listed = ", ".join(known) or "nothing"
        if self.target is not None and self.target.metric not in known:
            allowed = f"a metric that the evaluation gives: {listed}"
            raise ConfigError(Problem("workload.target.metric", self.target.metric, allowed))
        if "loss" not in known:
            allowed = f"a validation_step that logs its loss as val_loss; it gives {listed}"
            raise ConfigError(Problem(_KEY, self._path, allowed))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        module = self._set_up()
        with calling("evaluation", _KEY, self._path):
            trainer = evaluating_trainer(_CPU, limit_val_batches=1)
            return tuple(self._measured(module, _CPU, trainer))

    def metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics, from an evaluation of one batch."""
        return self._names

    def check(self) -> None:
        """Try the schedule, train on one batch and evaluate one, on the CPU.

        Raises:
            ConfigError: A hook of the module raised, or its schedule is of no use.
        """
        self._check_schedule()
        module = self._new(_DATA_SEED)
        size = self.default_batch_size
        loader = self.train_loader(peer=0, peers=1, batch_size=size, seed=_DATA_SEED)
        trainer = quiet_trainer(_CPU, max_steps=1, limit_val_batches=0)
        with silent(), same_random_numbers(_DATA_SEED), calling("training", _KEY, self._path):
            trainer.fit(module, loader)
        found = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
        plateau = any(
            isinstance(each.scheduler, ReduceLROnPlateau) for each in trainer.lr_scheduler_configs
        )
        if found[0] != 1 or found[1] > 1 or plateau or isinstance(trainer.optimizers[0], LBFGS):
            allowed = (
                "one optimizer that is not LBFGS, and at most one scheduler that needs no metric, "
                f"in configure_optimizers; it has {found[0]} and {found[1]}"
            )
            raise ConfigError(Problem(_KEY, self._path, allowed))
        self.metrics()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a hook that has run, or that only a module that trains needs."""
