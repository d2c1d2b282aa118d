"""The module that benchmarks train with torch's DDP and with rayhive, and both ways to train it."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.shaped_peers import Seat

PARAMETERS = 64 * 768 + 768 + 768 * 896 + 896 + 896 * 10 + 10
#: Rank of PowerSGD, and the first rounds of torch's PowerSGD, which average dense gradients.
RANK, DENSE = 4, 2
RUN = "against-ddp"


def make_module(batch_s: float, seed: int = 0) -> Any:
    """Return a module of 0.75 million parameters with a wait in its forward pass.

    Args:
        batch_s: The wait [s].
        seed: Seed of the parameters.
    """
    import torch

    class Waiting(torch.nn.Sequential):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            time.sleep(batch_s)
            return super().forward(data)

    torch.manual_seed(seed)
    return Waiting(
        torch.nn.Linear(64, 768), torch.nn.ReLU(), torch.nn.Linear(768, 896), torch.nn.ReLU(),
        torch.nn.Linear(896, 10),
    )  # fmt: skip


def hooked(seat: Seat, module: Any, hook: str | None) -> Any:
    """Return a module in DDP with a communication hook, as one rank of a gloo group."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "data0"
    seat.found()
    store = None
    if seat.index == 0:
        store = dist.TCPStore(seat.hosts[0], 29500, None, is_master=True, wait_for_workers=False)
    seat.tell("ready")
    store = store or dist.TCPStore(seat.hosts[0], 29500, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=seat.index, world_size=len(seat.hosts))
    options = {}
    if hook == "powersgd":
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
        options = {"bucket_cap_mb": 1000}
    parallel = torch.nn.parallel.DistributedDataParallel(module, **options)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=DENSE
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def joined(
    seat: Seat,
    configuration: dict[str, Any],
    samples: int,
    batch_size: int,
    module: Any,
    batches: Any,
    callback: Any,
    on_event: Any = None,
) -> None:
    """Train a module as one peer of a swarm, with the arguments that a study passes.

    Args:
        seat: The peer's place.
        configuration: Configuration of the study.
        samples: Samples of a round of gradients, over the swarm.
        batch_size: Samples of a batch.
        module: A Lightning module.
        batches: Its data.
        callback: A callback, which ends the training.
        on_event: Called with the kind and the fields of each event.
    """
    import hivemind
    import torch
    from lightning.pytorch import Trainer

    from rayhive.peer.from_spec import strategy_arguments
    from rayhive.spec import Configuration, SwarmConfig, WorkloadConfig
    from rayhive.spec.replicate import PeerSpec
    from rayhive.strategy.dht import dial_from_own_ports
    from rayhive.strategy.strategy import HivemindStrategy

    torch.set_num_threads(1)
    first = seat.found()
    host = seat.hosts[seat.index]
    dial_from_own_ports()
    dht = hivemind.DHT(
        initial_peers=first, host_maddrs=[f"/ip4/{host}/tcp/0"], use_relay=False, start=True
    )
    seat.tell([str(address) for address in dht.get_visible_maddrs()])
    peers = len(seat.hosts)
    spec = PeerSpec(
        run_id=RUN,
        peer=seat.index,
        peers=peers,
        workload=WorkloadConfig(name="digits"),
        swarm=SwarmConfig(peers=peers, target_batch_size=samples),
        configuration=Configuration(**configuration),
    )
    strategy = HivemindStrategy(dht=dht, on_event=on_event, **strategy_arguments(spec, batch_size))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches)
    dht.shutdown()
