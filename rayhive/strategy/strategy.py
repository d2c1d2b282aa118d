"""Lightning's strategy for training together with whoever is there: one peer of a swarm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import hivemind
import torch.multiprocessing
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from rayhive.errors import Problem
from rayhive.membership.progress_tracker import STRAGGLER_TIMEOUT_S
from rayhive.strategy import optimizer_factory
from rayhive.strategy.arguments import read_arguments
from rayhive.strategy.dht import SwarmDHT
from rayhive.strategy.grad_scaler import swarm_scaler
from rayhive.strategy.schedulers import HiveMindScheduler
from rayhive.strategy.session import Session
from rayhive.strategy.single_device import ReusableStrategy
from rayhive.strategy.validation import StrategyError, check_trainer

__all__ = ["HiveMindScheduler", "HivemindStrategy", "StrategyError"]

T = TypeVar("T")

# hivemind's import makes torch share tensors through files in /dev/shm that a killed process
# leaves behind; descriptors, torch's own default on Linux, vanish with the process.
torch.multiprocessing.set_sharing_strategy(  # type: ignore[no-untyped-call]
    os.environ.get("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
)


class _SkippedBatch(Exception):
    """The module's ``training_step`` returned None: there is no gradient to count."""


class HivemindStrategy(ReusableStrategy):
    """Trains a module together with other peers, over links and on machines that may fail.

    Each peer computes gradients of its own batches. When the swarm has ``target_batch_size``
    samples together, a *round* happens: gradients are averaged and every peer steps. A batch is
    what Lightning counts as a step; a round is what moves the weights.

    Mistakes in the arguments are told all at once, before anything starts.

    Args:
        target_batch_size: Samples of the whole swarm in one round.
        run_id: Name of the run; peers with the same name train together. Without dots.
        batch_size: Samples in each batch of this peer; counted in each batch if absent.
        delay_state_averaging: Average parameters in the background.
        delay_optimizer_step: Step in the background; needs ``delay_state_averaging``. Follows
            ``delay_grad_averaging`` if absent.
        delay_grad_averaging: Average gradients in the background; needs both of the above.
        offload_optimizer: Keep the optimizer on the host. On if absent and anything is delayed.
        reuse_grad_buffers: Accumulate gradients in ``parameter.grad``; the module's
            ``zero_grad`` and ``optimizer_zero_grad`` then do nothing while it trains.
        scheduler_fn: ``callable(optimizer) -> scheduler``. Required for a scheduler where the
            optimizer is re-created, that is with delays or ``offload_optimizer``; otherwise it
            takes the place of the module's schedulers.
        matchmaking_time: Longest wait for a peer that has come to a round and cannot be met [s]; a
            round begins when all are there.
        averaging_timeout: Longest time of one averaging [s].
        verbose: Let hivemind report what it does.
        averager_opts: Further options of both averagers.
        host_maddrs: Addresses to listen on.
        initial_peers: Addresses of peers to join: a list, or a string with commas. If absent,
            ``PL_INITIAL_PEERS`` and then ``INITIAL_PEERS`` of the environment count.
        use_ipfs: Find peers over IPFS.
        wait_timeout: Longest wait for an answer of the DHT [s].
        bootstrap_timeout: Longest wait for further peers after one has answered [s].
        use_relay: Reach peers behind firewalls through relays.
        use_auto_relay: Be reached through relays.
        identity_path: File with a private key, made if absent, that keeps the peer's ID.
        dht: A running DHT to use, which its owner ends. None starts one and ends it with the fit.
        on_event: Called with the kind and the fields of each event; see
            :data:`rayhive.events.KINDS`.
        global_zero: Whether Lightning sees this peer as the one that acts for all (progress bar,
            summaries, results). If absent, the one that found nobody else in the run.
        load_initial_state: Whether to take the parameters of a peer that is no further, at the
            start. If absent, only a peer that joins others with a DHT of its own does.
        straggler_timeout: How long a round waits for a peer that computes and makes no progress,
            until it does [s].
        **optimizer_kwargs: Further arguments of the swarm's optimizer, for example
            ``grad_compression``, ``grad_averager_factory``, ``outlier_filter`` or
            ``aggregation``. ``extra_tensors`` may also be a function of the module.

    Raises:
        StrategyError: The arguments cannot work, or not together.
        PeerError: No peer answers at the addresses.
    """

    strategy_name = "hivemind"

    def __init__(
        self,
        target_batch_size: int,
        run_id: str = "lightning_run",
        batch_size: int | None = None,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        scheduler_fn: Any = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        verbose: bool = False,
        averager_opts: dict[str, Any] | None = None,
        host_maddrs: list[Any] | None = None,
        initial_peers: str | Iterable[Any] | None = None,
        use_ipfs: bool = False,
        wait_timeout: int = 3,
        bootstrap_timeout: float | None = None,
        use_relay: bool = True,
        use_auto_relay: bool = False,
        identity_path: str | None = None,
        *,
        dht: hivemind.DHT | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        global_zero: bool | None = None,
        load_initial_state: bool | None = None,
        straggler_timeout: float = STRAGGLER_TIMEOUT_S,
        **optimizer_kwargs: Any,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        settings = read_arguments(**arguments.pop("optimizer_kwargs"), **arguments)
        self._settings = settings
        self._initial_peers = settings.initial_peers
        self._participation: Session | None = None
        self._running = False
        self._caught_up = False
        self._leaving = False
        self._membership = SwarmDHT(run_id, dht, settings.initial_peers, settings.network)
        self._take_equal = (
            dht is None and settings.initial_peers is not None
            if load_initial_state is None
            else load_initial_state
        )
        self._global_zero = self._membership.is_first if global_zero is None else global_zero

    # -- what others ask -----------------------------------------------------------------------

    @property
    def dht(self) -> hivemind.DHT:
        """The peer's DHT."""
        return self._membership.dht

    @property
    def optimizer(self) -> Any:
        """The swarm's optimizer of the present or last fit.

        Raises:
            RuntimeError: Nothing was fitted yet.
        """
        if self._participation is None:
            raise RuntimeError("the optimizer of the swarm exists from the setup of a fit on")
        return self._participation.optimizer

    @property
    def num_peers(self) -> int:
        """Peers in the run as far as is known, this one included."""
        if self._participation is None or not self._running:
            return 1
        return max(1, int(self.optimizer.tracker.global_progress.num_peers))

    @property
    def addresses(self) -> list[str]:
        """Where other machines can join this peer."""
        return self._membership.addresses

    # -- Lightning's view of the peer ----------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this peer acts for all: it was the first of the run, unless told otherwise."""
        return self._global_zero

    @property
    def global_rank(self) -> int:
        """0 for the peer that acts for all, 1 for every other one."""
        return 0 if self._global_zero else 1

    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        """Return ``tensor``: a metric is this peer's own."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return ``tensor``: there is no group of fixed members to gather from."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: peers come and go."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return ``obj``: each peer decides for itself."""
        return obj

    # -- a fit ---------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Prepare the trainer's task; for a fit, join and build the swarm's optimizer.

        Raises:
            StrategyError: Trainer, module and strategy do not go together.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._leaving = True
            check_trainer(trainer)
            self._membership.join()
        super().setup(trainer)
        if fitting:
            self._take_part(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Configure the module's optimizer.

        Raises:
            StrategyError: It has several.
        """
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise StrategyError(optimizer_factory.several_optimizers("several")) from error

    def _take_part(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            reuse = bool(self._settings.optimizer["reuse_grad_buffers"])
            plugin.scaler = swarm_scaler(plugin.scaler, reuse)
        self._participation = Session(
            membership=self._membership,
            trainer=trainer,
            module=module,
            configured=optimizer_factory.check_configured(self.optimizers),
            configs=self.lr_scheduler_configs,
            scheduler_fn=self._settings.scheduler_fn,
            recreates=self._settings.delays.offload,
            arguments=self._settings.optimizer,
        )
        self._running, self._caught_up = True, False
        self.optimizers = [self.optimizer]
        self.lr_scheduler_configs = self._participation.configs

    def on_train_start(self) -> None:
        """Take the state of a peer that is further; from now on, share one's own."""
        self.catch_up()
        self.optimizer.end_batch()

    def catch_up(self) -> None:
        """Do so now, if it was not done in this fit.

        A callback that holds peers at a barrier calls it before: behind the barrier the others
        train already, and a peer that takes their state then misses the round they are in.
        """
        if self._participation is not None and self._running and not self._caught_up:
            self._caught_up = True
            self._participation.catch_up(self._take_equal and self.optimizer.local_epoch == 0)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch; one to train on ends a break, before anything looks at the parameters."""
        if self._running and getattr(self.lightning_module, "training", False):
            self._begin_batch()
        return super().batch_to_device(batch, *args, **kwargs)

    def _begin_batch(self) -> None:
        if self._caught_up:
            self.optimizer.begin_batch()

    def on_validation_start(self) -> None:
        """Let the others go on without this peer if the validation takes long."""
        if self._running:
            self.optimizer.end_batch()

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Come back to the rounds, and count the samples of the batch.

        Raises:
            StrategyError: They cannot be counted.
        """
        self._begin_batch()
        if self._settings.batch_size is None:
            try:
                self.optimizer.batch_size_per_step = extract_batch_size(batch)
            except (MisconfigurationException, RecursionError) as error:
                raise StrategyError(
                    Problem(
                        "batch_size",
                        None,
                        "a number, as the samples of a batch could not be counted. Please provide "
                        "the batch size to the Strategy. It is HivemindStrategy(batch_size=...)",
                    )
                ) from error
        if self._participation is not None:
            self._participation.expect_batch()

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute a batch's gradients and, when a round is due, take part in it.

        A batch for which ``training_step`` returns None has no gradients and is not counted.
        """
        participation, module = self._participation, self.lightning_module
        assert participation is not None and module is not None
        participation.raise_errors()

        def counted() -> Any:
            loss = closure()
            if loss is None and module.automatic_optimization:
                raise _SkippedBatch
            return loss

        try:
            result = super().optimizer_step(optimizer, counted, model, **kwargs)
        except _SkippedBatch:
            return None
        finally:
            participation.optimizer.end_batch()
        participation.raise_errors()
        return result

    def on_train_end(self) -> None:
        """Wait for what is averaged in the background."""
        if self._participation is not None:
            self._participation.settle()

    # -- checkpoints ---------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with all that was going on in the background in it."""
        if self._participation is not None:
            self._participation.settle()
        return super().lightning_module_state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer and the round.

        Raises:
            StrategyError: The checkpoint is of a run with several optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise StrategyError(optimizer_factory.several_optimizers(len(states)))
        assert self._participation is not None
        self._participation.restore(states[0])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; each peer does, as each has a disk of its own."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint that this peer wrote."""
        self.checkpoint_io.remove_checkpoint(filepath)

    # -- the end -------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Leave the swarm at teardown, whatever was going on."""
        self._leaving = True

    def teardown(self) -> None:
        """End what the fit started; nothing of it is left behind.

        The DHT stays for a later fit if this was a validation, a test or a prediction.
        """
        try:
            if self._participation is not None and self._running:
                self._running = False
                self._participation.end()
        finally:
            try:
                if self._leaving:
                    self._leaving = False
                    self._membership.leave()
            finally:
                super().teardown()
