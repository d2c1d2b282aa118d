"""Training of one rank of torch's DDP, in a plain loop or in Lightning's."""

from __future__ import annotations

from typing import Any

from benchmarks.both_sides import RANK, Stops, Task, batches_of, lightning_module, plain_trainer
from benchmarks.shaped_peers import Seat

#: First rounds of torch's PowerSGD, which average dense gradients.
DENSE = 2


def join_group(seat: Seat) -> None:
    """Initialise torch's process group over gloo, with one member on each seat."""
    import os

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    seat.found()
    store = None
    if seat.index == 0:
        store = dist.TCPStore(seat.hosts[0], 29500, None, is_master=True, wait_for_workers=False)
    seat.tell("ready")
    store = store or dist.TCPStore(seat.hosts[0], 29500, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=seat.index, world_size=len(seat.hosts))


def hook_of(
    name: str | None, rank: int = RANK, skip_dense: bool = False
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a communication hook of torch, its state, and the arguments of DDP that suit it.

    Args:
        name: ``fp16``, ``powersgd``, or None.
        rank: Rank of PowerSGD.
        skip_dense: Whether PowerSGD begins at once. Its first rounds are else dense.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name is None:
        return None, None, {}
    if name == "fp16":
        return default_hooks.fp16_compress_hook, None, {}
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=DENSE
    )
    state.iter = DENSE if skip_dense else 0
    return powerSGD_hook.powerSGD_hook, state, {"bucket_cap_mb": 1000}


def hooked(
    seat: Seat, module: Any, hook: str | None, rank: int = RANK, skip_dense: bool = False
) -> Any:
    """Return a module in DDP with a communication hook, as one rank of a gloo group.

    Args:
        seat: Place of the rank.
        module: The module.
        hook: ``fp16``, ``powersgd``, or None.
        rank: Rank of PowerSGD.
        skip_dense: Whether PowerSGD begins at once. Its first rounds are else dense.
    """
    import torch

    join_group(seat)
    chosen, state, options = hook_of(hook, rank, skip_dense)
    parallel = torch.nn.parallel.DistributedDataParallel(module, **options)
    if chosen is not None:
        parallel.register_comm_hook(state, chosen)
    return parallel


def lightning_rounds(
    seat: Seat, task: Task, hook: str, rounds: int, warm_up: int
) -> dict[str, Any]:
    """Train one rank of DDP in Lightning's loop; return its rounds, see :class:`Stops`.

    The strategy is that of the baselines, without Lightning's broadcast before each batch.

    Args:
        seat: Place of the rank.
        task: What the rank trains.
        hook: ``fp16`` or ``powersgd``.
        rounds: Rounds that are measured.
        warm_up: Rounds before them.
    """
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Callback

    from rayhive.baselines.collectives import Traffic
    from rayhive.baselines.ddp import MeasuredDDP, PeerEnvironment

    join_group(seat)
    chosen, state, options = hook_of(hook)
    stops = Stops(warm_up, seat.interface)

    class Rounds(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            stops.note(trainer.global_step)

    strategy = MeasuredDDP(
        Traffic(),
        chosen,
        state,
        parallel_devices=[torch.device("cpu")],
        cluster_environment=PeerEnvironment(seat.index, len(seat.hosts)),
        process_group_backend="gloo",
        **options,
    )
    trainer = plain_trainer(
        strategy, Rounds(), max_steps=rounds + warm_up, accumulate_grad_batches=task.batches
    )
    trainer.fit(lightning_module(task), batches_of(task))
    dist.barrier()
    return stops.result()
