"""Lightning strategy that trains a module as one peer of a swarm."""

from __future__ import annotations

import contextlib
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

from rayhive.membership.progress_tracker import STRAGGLER_TIMEOUT_S
from rayhive.strategy import optimizer_factory
from rayhive.strategy.arguments import StrategyError, check_trainer, read_arguments
from rayhive.strategy.dht import SwarmDHT
from rayhive.strategy.gradients import swarm_scaler
from rayhive.strategy.schedulers import HiveMindScheduler
from rayhive.strategy.session import Session
from rayhive.strategy.single_device import ReusableStrategy

__all__ = ["HiveMindScheduler", "HivemindStrategy", "StrategyError"]

T = TypeVar("T")

#: Local names in ``HivemindStrategy.__init__`` that are no settings of the swarm.
_OWN = {"self", "__class__", "global_zero", "load_initial_state", "optimizer_kwargs"}

# hivemind makes torch share tensors through files in /dev/shm, which a killed process leaves
# behind. File descriptors, torch's own default on Linux, vanish with the process.
torch.multiprocessing.set_sharing_strategy(  # type: ignore[no-untyped-call]
    os.environ.get("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
)


class _SkippedBatch(Exception):
    """The module's ``training_step`` returned None: there is no gradient to count."""


class HivemindStrategy(ReusableStrategy):
    """Trains a module together with other peers, over links and on machines that may fail.

    Each peer computes gradients of its own batches. Once the swarm has ``target_batch_size``
    samples, a *round* happens: gradients are averaged and every peer steps. Lightning counts
    batches as steps; the weights move once per round.

    All mistakes in the arguments are reported together, before anything starts.

    Args:
        target_batch_size: Samples of the whole swarm in one round.
        run_id: Name of the run, without dots; peers with the same name train together.
        batch_size: Samples of each batch of this peer; counted in every batch if absent.
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
        matchmaking_time: Longest wait for a peer that has begun a round and cannot be reached [s].
            A round begins as soon as all live peers are there.
        averaging_timeout: Longest time of one averaging in which no data move [s].
        verbose: Log hivemind's steps at level INFO.
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
        dht: A running DHT to use; its owner ends it. None starts one and ends it with the fit.
        on_event: Called with the kind and the fields of each event; see
            :data:`rayhive.events.KINDS`.
        global_zero: Whether this peer is Lightning's global rank 0 (progress bar, summaries,
            results). If absent, the first peer of the run is.
        load_initial_state: Whether to download the parameters of a peer in the same round at the
            start. If absent, a peer with a DHT of its own does; the first one, too, as another
            may be ready sooner.
        straggler_timeout: How long a round waits for a peer that computes without progress [s].
        **optimizer_kwargs: Further arguments of the swarm's optimizer, for example
            ``grad_compression``, ``grad_averager_factory``, ``outlier_filter`` or
            ``aggregation``. ``extra_tensors`` may also be a function of the module.

    Raises:
        StrategyError: An argument is not valid, or arguments contradict each other.
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
        arguments = {name: value for name, value in locals().items() if name not in _OWN}
        super().__init__()
        self.settings = settings = read_arguments({**arguments, **optimizer_kwargs})
        self._session: Session | None = None
        self._running = False
        self._caught_up = False
        self._leaving = self._failed = False
        self._swarm = SwarmDHT(run_id, dht, settings.initial_peers, settings.network)
        self._take_equal = dht is None if load_initial_state is None else load_initial_state
        self._global_zero = self._swarm.is_first if global_zero is None else global_zero

    # -- the peer ----------------------------------------------------------------------------------

    @property
    def dht(self) -> hivemind.DHT:
        """The peer's DHT."""
        return self._swarm.dht

    @property
    def optimizer(self) -> Any:
        """The swarm's optimizer in the present or last fit.

        Raises:
            RuntimeError: There was no fit yet.
        """
        if self._session is None:
            raise RuntimeError("the optimizer of the swarm exists from the setup of a fit on")
        return self._session.optimizer

    @property
    def num_peers(self) -> int:
        """Known live peers of the run, this one included."""
        if self._session is None or not self._running:
            return 1
        return int(self.optimizer.live_peers)

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other machines can join this peer."""
        return self._swarm.addresses

    # -- Lightning's ranks and collectives ---------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this peer is Lightning's global rank 0: by default the first peer of the run."""
        return self._global_zero

    @property
    def global_rank(self) -> int:
        """0 for the peer that is global zero, 1 for all other peers."""
        return 0 if self._global_zero else 1

    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        """Return ``tensor``: metrics are not reduced over peers."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return ``tensor``: a swarm has no fixed members to gather from."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: a swarm has no fixed members to wait for."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return ``obj``: every peer keeps its own."""
        return obj

    # -- a fit -------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Prepare the trainer's task; for a fit, join the swarm and build its optimizer.

        Raises:
            StrategyError: The trainer or the module cannot train in a swarm.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._leaving, self._failed = True, False
            check_trainer(trainer, self.settings.optimizer.get("local_steps") is not None)
            self._swarm.join()
        super().setup(trainer)
        if fitting:
            self._take_part(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Configure the module's optimizer.

        Raises:
            StrategyError: It has several optimizers.
        """
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise optimizer_factory.several_optimizers("several") from error

    def _take_part(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            reuse = bool(self.settings.optimizer["reuse_grad_buffers"])
            plugin.scaler = swarm_scaler(plugin.scaler, reuse)
        self._session = Session(
            swarm=self._swarm,
            trainer=trainer,
            module=module,
            configured=optimizer_factory.check_configured(self.optimizers),
            configs=self.lr_scheduler_configs,
            settings=self.settings,
        )
        self._running, self._caught_up = True, False
        self.optimizers = [self.optimizer]
        self.lr_scheduler_configs = self._session.configs

    def on_train_start(self) -> None:
        """Download the state of a peer that is further, and share this peer's from now on."""
        self.catch_up()
        self.optimizer.end_batch()

    def catch_up(self) -> None:
        """Download the state of a peer that is further, unless that was done in this fit.

        A callback with a barrier calls it before the barrier. Behind it, the other peers train
        already, and a peer that downloads their state misses their present round.
        """
        if self._session is not None and self._running and not self._caught_up:
            self._caught_up = True
            self._session.catch_up(self._take_equal and self.optimizer.local_epoch == 0)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch to the device; a training batch ends a break, before the forward pass."""
        if self._running and getattr(self.lightning_module, "training", False):
            self._begin_batch()
        return super().batch_to_device(batch, *args, **kwargs)

    def _begin_batch(self) -> None:
        if self._caught_up:
            self.optimizer.begin_batch()

    def on_validation_start(self) -> None:
        """Begin a break: the peer steps out of the rounds if the validation takes long.

        Validates the parameters that the peers have in common.
        """
        if self._running and self._session is not None:
            self.optimizer.end_batch()
            self._session.show_common(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Return to the rounds, and count the samples of the batch.

        Raises:
            StrategyError: The samples cannot be counted.
        """
        self._begin_batch()
        if self.settings.optimizer["batch_size_per_step"] is None:
            try:
                self.optimizer.batch_size_per_step = extract_batch_size(batch)
            except (MisconfigurationException, RecursionError) as error:
                raise StrategyError.about(
                    "batch_size",
                    None,
                    "a number, as the samples of a batch could not be counted. Please provide "
                    "the batch size to the Strategy. It is HivemindStrategy(batch_size=...)",
                ) from error
        if self._session is not None:
            self._session.expect_batch()

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients of a batch, and take part in a round if one is due.

        A batch for which ``training_step`` returns None has no gradients and is not counted.
        """
        session, module = self._session, self.lightning_module
        assert session is not None and module is not None
        session.raise_errors()

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
            session.end_step()
            session.optimizer.end_batch()
        session.raise_errors()
        return result

    def on_validation_end(self) -> None:
        """Give the module its own parameters back, with local steps."""
        if self._session is not None and self._running:
            self._session.show_common(False)

    def on_train_end(self) -> None:
        """Wait for background work, and apply its results."""
        if self._session is not None:
            self._session.settle()
            self._session.show_common(True)

    # -- checkpoints -------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with the parameters that the peers have in common."""
        state_dict = super().lightning_module_state_dict
        return state_dict() if self._session is None else self._session.common_state(state_dict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint."""
        state = super().optimizer_state(optimizer)
        return state if self._session is None else self._session.checkpointed(state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer and the round.

        Raises:
            StrategyError: The checkpoint holds several optimizers.
        """
        states = checkpoint["optimizer_states"]
        if len(states) != 1:
            raise optimizer_factory.several_optimizers(len(states))
        assert self._session is not None
        self._session.restore(states[0])

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint. Every peer does, because each may have a disk of its own."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of this peer."""
        self.checkpoint_io.remove_checkpoint(filepath)

    # -- the end -----------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Leave the swarm at teardown, without waiting for background work."""
        self._leaving = self._failed = True

    def teardown(self) -> None:
        """End the processes of a fit. The DHT stays after validation, test and prediction."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().teardown)
            if self._leaving:
                self._leaving = False
                stack.callback(self._swarm.leave)
            if self._session is not None and self._running:
                self._running = False
                self._session.end(abandon=self._failed)
