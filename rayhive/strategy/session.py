"""One fit in the swarm, from the module's optimizer to the swarm's and back."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.optim.child_processes import ChildProcesses, end_process
from rayhive.optim.local_steps import with_common_parameters
from rayhive.optim.optimizer import RayhiveOptimizer
from rayhive.strategy import optimizer_factory
from rayhive.strategy.arguments import Settings, StrategyError
from rayhive.strategy.checkpoint_layout import CheckpointLayout
from rayhive.strategy.dht import SwarmDHT
from rayhive.strategy.gradients import clipping_in_rounds, clips, overridden, refuse_fused
from rayhive.strategy.schedulers import RoundSchedule, refuse_plateau, unscheduled, wrapped_config

log = logging.getLogger("rayhive.peer")


class Session:
    """Builds the swarm's optimizer for one fit, and ends it.

    Args:
        swarm: The peer's DHT.
        trainer: The trainer.
        module: The trained module, on its device.
        configured: The optimizer of ``configure_optimizers``.
        configs: Lightning's records of the schedulers of ``configure_optimizers``.
        settings: The strategy's settings.

    Attributes:
        optimizer: The swarm's optimizer.
        configs: Lightning's records of its schedulers.

    Raises:
        StrategyError: The module cannot train with the strategy's arguments.
    """

    def __init__(
        self,
        *,
        swarm: SwarmDHT,
        trainer: Trainer,
        module: LightningModule,
        configured: Optimizer,
        configs: list[LRSchedulerConfig],
        settings: Settings,
    ) -> None:
        self._swarm, self._children = swarm, ChildProcesses()
        self._trainer, self._module = trainer, module
        self._scheduler_fn = settings.scheduler_fn
        self._changes = contextlib.ExitStack()  # of the module, for the length of the fit
        self._errors: list[Exception] = []
        self._running = False
        arguments = settings.optimizer
        self._batch_size = arguments["batch_size_per_step"]
        self._waiting = 0  # samples of batches that Lightning accumulates for one local step
        local = arguments.get("local_steps") is not None
        # with local steps the optimizer steps the module itself, as in any other training
        clipping = clips(trainer, module) and not local
        if not local:
            refuse_plateau([config.scheduler for config in configs])
        if clipping:
            refuse_fused(trainer, configured)
        recreates = arguments["offload_optimizer"] and not local
        if recreates:
            self._check_recreation(configs)
        self._layout = CheckpointLayout.of(configured)
        optimizer_factory.leave_out_frozen(configured)
        if local:
            configs = self._own_schedulers(configured, configs)
            parts = self._as_it_is(configured, [], None)
        elif recreates:
            parts = self._recreated(configured)
        else:
            parts = self._as_it_is(configured, configs, self._scheduler_fn)
        decay = optimizer_factory.NoDecay(parts["params"] or configured.param_groups)
        with self._children.forking():
            self.optimizer: Any = RayhiveOptimizer(
                dht=swarm.dht, **parts, **self._with_extra_tensors(arguments)
            )
        self._running = True
        try:
            decay.lift(self.inner.param_groups)
            self.optimizer.defaults = self.inner.defaults  # read by callbacks
            self._share_state(False)
            self.configs = configs if local else self._configs(configs)
            if arguments["reuse_grad_buffers"]:
                self._keep_gradients()
            if clipping:
                clipping_in = clipping_in_rounds(trainer, module, self.inner, self._keep_errors)
                self._changes.enter_context(clipping_in)
        except BaseException:
            self.end(abandon=True)
            raise

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer of the module; without local steps it steps once per round."""
        local = self.optimizer.local_steps
        inner: Optimizer = self.optimizer.state_averager.optimizer if local is None else local.inner
        return inner

    @property
    def _averagers(self) -> list[Any]:
        return [self.optimizer.state_averager, self.optimizer.grad_averager]

    @property
    def _schedule(self) -> RoundSchedule | None:
        schedule = self.optimizer.state_averager.scheduler
        return schedule if isinstance(schedule, RoundSchedule) else None

    # -- construction ------------------------------------------------------------------------------

    def _check_recreation(self, configs: list[LRSchedulerConfig]) -> None:
        if isinstance(self._scheduler_fn, LRScheduler):
            raise StrategyError.about(
                "scheduler_fn",
                type(self._scheduler_fn).__name__,
                "callable(optimizer) -> scheduler: the optimizer is re-created, and an existing "
                "scheduler would schedule the old one",
            )
        if self._scheduler_fn is not None:
            return
        if configs:
            raise StrategyError.about(
                "scheduler_fn",
                None,
                "callable(optimizer) -> scheduler. `delay_optimizer_step`, `delay_state_averaging` "
                "or `offload_optimizer` requires a `scheduler_fn` to be passed to the strategy: "
                "the optimizer is re-created, and the scheduler of configure_optimizers "
                f"({type(configs[0].scheduler).__name__}) would be dropped",
            )
        rank_zero_warn(
            "The optimizer is re-created by hivemind: enabling `delay_optimizer_step`, "
            "`delay_state_averaging` or `offload_optimizer` requires a `scheduler_fn` to be "
            "passed to the strategy, should you want a learning-rate scheduler."
        )

    def _recreated(self, configured: Optimizer) -> dict[str, Any]:
        scheduler = None
        if self._scheduler_fn is not None:

            def scheduler(optimizer: Optimizer) -> RoundSchedule:
                return self._schedule_of(optimizer, [self._scheduler_fn(optimizer)])

        return {
            "params": [unscheduled(group) for group in configured.param_groups],
            "optimizer": optimizer_factory.recreate(configured),
            "scheduler": scheduler,
        }

    def _own_schedulers(
        self, configured: Optimizer, configs: list[LRSchedulerConfig]
    ) -> list[LRSchedulerConfig]:
        """Return the records with which Lightning steps the schedulers of local steps."""
        given = self._scheduler_fn
        if given is None:
            return configs
        made = given if isinstance(given, LRScheduler) else given(_as_unscheduled(configured))
        if getattr(made, "optimizer", None) is not configured:
            allowed = "a scheduler of the optimizer that configure_optimizers returns"
            raise StrategyError.about("scheduler_fn", type(made).__name__, allowed)
        return [LRSchedulerConfig(made, interval="step")]

    def _as_it_is(
        self, configured: Optimizer, configs: list[LRSchedulerConfig], given: Any
    ) -> dict[str, Any]:
        schedulers = [config.scheduler for config in configs]
        if isinstance(given, LRScheduler):
            if getattr(given, "optimizer", None) is not configured:
                raise StrategyError.about(
                    "scheduler_fn",
                    type(given).__name__,
                    "callable(optimizer) -> scheduler, or a scheduler of the optimizer that "
                    "configure_optimizers returns",
                )
            schedulers = [given]
        elif given is not None:
            schedulers = [given(_as_unscheduled(configured))]
        optimizer_factory.initialise_state(configured)
        return {
            "params": None,
            "optimizer": configured,
            "scheduler": self._schedule_of(configured, schedulers) if schedulers else None,
        }

    def _schedule_of(self, optimizer: Optimizer, schedulers: list[Any]) -> RoundSchedule:
        refuse_plateau(schedulers)
        module = self._module
        advance = self._keep_errors(lambda scheduler: module.lr_scheduler_step(scheduler, None))
        return RoundSchedule(optimizer, schedulers, advance)

    def _with_extra_tensors(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the list of extra tensors that peers average.

        Raises:
            StrategyError: An entry is not a tensor, cannot be averaged, or is on another device.
        """
        extra = arguments.get("extra_tensors") or ()
        extra = list(extra(self._module) if callable(extra) else extra)
        problems = optimizer_factory.extra_tensor_problems(extra, self._module.device)
        if problems:
            raise StrategyError(problems)
        return {**arguments, "extra_tensors": extra}

    def _configs(self, configs: list[LRSchedulerConfig]) -> list[LRSchedulerConfig]:
        if self._schedule is None:
            return []
        schedulers = self._schedule.schedulers
        if self._scheduler_fn is not None:
            configs = [LRSchedulerConfig(item, interval="step") for item in schedulers]
        pairs = zip(schedulers, configs, strict=True)
        return [wrapped_config(self.optimizer, scheduler, config) for scheduler, config in pairs]

    def _keep_gradients(self) -> None:
        """Disable the module's ``zero_grad``: gradients accumulate until the round."""
        if is_overridden("optimizer_zero_grad", self._module):
            warnings.warn(
                "You have overridden `optimizer_zero_grad` which will be disabled."
                " With `HivemindStrategy(reuse_grad_buffers=True)` gradients are accumulated in"
                " the model itself, and only a round may clear them.",
                UserWarning,
                stacklevel=2,
            )
        for name in ("zero_grad", "optimizer_zero_grad"):
            no_op = overridden(self._module, name, lambda *_args, **_kwargs: None)
            self._changes.enter_context(no_op)

    def _share_state(self, allowed: bool) -> None:
        for averager in self._averagers:
            if not averager.client_mode:
                averager.allow_state_sharing = allowed

    # -- training ----------------------------------------------------------------------------------

    def _keep_errors(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return ``function`` with its errors kept; hivemind only logs errors of its threads."""

        @wraps(function)
        def kept(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except Exception as error:
                self._errors.append(error)
                raise

        return kept

    def raise_errors(self) -> None:
        """Raise the first error of a background thread, if there is one."""
        if self._errors:
            raise self._errors.pop(0)

    def expect_batch(self) -> None:
        """Prepare for the gradients of the next batch, whose samples are counted."""
        if self.optimizer.local_steps is not None:
            batch = self._batch_size or self.optimizer.batch_size_per_step
            self._waiting += batch
            self.optimizer.batch_size_per_step = self._waiting
            return
        averager, samples = self.optimizer.grad_averager, self.optimizer.batch_size_per_step
        if isinstance(averager, RayhiveGradientAverager) and samples:
            averager.expect_batch(samples)

    def end_step(self) -> None:
        """Note that the samples of all batches since the last step are counted."""
        self._waiting = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's optimizer state and round, and put the schedule there."""
        round_ = optimizer_factory.load_state(self.optimizer, self._layout.reduced(state))
        self.optimizer.restore_round(round_)
        if self._schedule is not None:
            self._schedule.restore(round_, state["param_groups"])

    def catch_up(self, take_equal: bool) -> None:
        """Download the state of a peer that is further, then begin to share this peer's.

        Args:
            take_equal: Download it from a peer in the same round, too. Peers with the same
                initial parameters do not need that.
        """
        own = self.optimizer.local_epoch
        best = self._swarm.newest_shared_round()
        if own == 0 and self._swarm.round_at_join > (best or 0):
            best = self._swarm.round_at_join  # all that had its state may have died meanwhile
        if best is not None and (best > own or (best == own and take_equal)):
            log.info(f"downloading the state of a peer in round {best}")
            self.optimizer.load_state_from_peers(shared=best)
            self.optimizer.tracker.take_part(False)  # until the first batch
        self._share_state(not self.optimizer.tracker.view.own.untrained)

    def settle(self) -> None:
        """Wait for background work, and apply its results to the module."""
        if self._running:
            self.optimizer.settle()

    # -- local steps -------------------------------------------------------------------------------

    @property
    def _shows_common(self) -> bool:
        local = self.optimizer.local_steps
        return local is not None and bool(local.shows_outer)

    def show_common(self, shown: bool) -> None:
        """Give the module the parameters that the peers have in common, or its own ones back."""
        local = self.optimizer.local_steps
        if local is not None:
            (local.show_outer if shown else local.hide_outer)()

    def common_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the module's state with the parameters that the peers have in common.

        Background work is awaited for it, and its results are applied.
        """
        self.settle()
        if self.optimizer.local_steps is None or self._shows_common:
            return state_dict()
        with with_common_parameters(self.optimizer):
            return copy.deepcopy(state_dict())

    def checkpointed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint; :meth:`restore` restores it."""
        found = optimizer_factory.state_for_checkpoint(self.optimizer, state)
        return self._layout.whole(found)

    # -- the end -----------------------------------------------------------------------------------

    def end(self, *, abandon: bool = False) -> None:
        """Leave the run and restore the module; calling it again does nothing.

        Args:
            abandon: The fit was interrupted or has failed: do not wait for background work.
        """
        self._changes.close()
        if not self._running:
            return
        self._running = False
        averagers = self._averagers  # the optimizer drops them
        try:
            self.optimizer.shutdown(abandon=abandon)
        except Exception as error:
            log.warning(f"could not say goodbye to the peers: {error!r}")
        for averager in averagers:
            end_process(averager)
        self._children.remove_sockets()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _as_unscheduled(optimizer: Optimizer) -> Optimizer:
    """Restore the rates from before the first scheduler, for one that replaces it; return it."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    return optimizer
