"""Peers that share one GPU: rounds of a transformer of 100 million parameters, by precision.

Claims, for 4 peers without a link between them: a round of rayhive's defaults takes at most 1.1
times as long as one of torch's DDP over gloo in the same precision, and the replicas are equal to
the bit at the end. nccl refuses two ranks on one GPU, so DDP averages over gloo.

All variants train the same module on the same batches, ``--batches`` of them a round, in fresh
processes, one variant after the other. ``computing alone`` is the loop of DDP in which nothing is
averaged: four processes that share the GPU. DDP averages in the precision of the parameters, which
is float32 in mixed precision as well. rayhive's variants run through ``HivemindStrategy``, with the
arguments that a study passes. A round's time is that between two optimizer steps of a peer.

``--device cpu`` with a small ``--width`` and few ``--layers`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.both_sides import RANK, Stops, Task, peer_rounds
from benchmarks.claims import Claim, print_claims, print_fact
from benchmarks.ddp_side import hooked
from benchmarks.memory import resident
from benchmarks.ratios import ratio
from benchmarks.shaped_peers import Nodes, Seat, on_loopback
from benchmarks.swarm import conditions

VOCABULARY, CONTEXT, HEADS = 20480, 256, 12
#: Sequences of a batch.
BATCH = 8
#: Rounds before the measurement: the first ones reserve memory.
WARM_UP = 2
#: Time limit of a swarm [s].
SWARM_S = 180.0
#: Lightning's name of each precision.
PRECISIONS = {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
#: DDP's communication hook by the name of the variant; ``computing alone`` averages nothing.
TORCH = {"computing alone": None, "DDP": None, "DDP, PowerSGD": "powersgd"}
#: Configuration of rayhive's variants.
OURS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, trusted network": {},
    "float16": {"codec": "float16"},
    "uniform8": {"codec": "uniform8"},
    "PowerSGD": {"powersgd_rank": RANK},
    "PowerSGD, factors on the CPU": {"powersgd_rank": RANK},
    "delay gradients": {"delay": "gradients"},
}
RIVAL = {name: "DDP, PowerSGD" if "PowerSGD" in name else "DDP" for name in OURS}


@dataclass
class Measured:
    """Results of one variant, those of its peers together.

    Attributes:
        seconds: Durations of rounds [s].
        averaging: Durations of all-reduces of gradients [s]; empty for torch's variants.
        sent: Payload that a peer sent in a round [bytes].
        peak: Most memory of the GPU that a peer's tensors took [bytes].
        resting: Memory that they take after a round [bytes].
        host: Memory of a peer's processes on the host after a round [bytes].
        incomplete: Averagings that were not complete.
        replicas: Different parameters at the end.
        losses: Loss of the first and the last measured batch of each peer.
    """

    seconds: list[float]
    averaging: list[float]
    sent: list[float]
    peak: float
    resting: float
    host: float
    incomplete: int
    replicas: int
    losses: list[list[float]]

    @classmethod
    def of(cls, peers: list[dict[str, Any]]) -> Measured:
        """Return the results of the peers of a swarm together."""

        def joined(name: str) -> list[Any]:
            return [value for peer in peers for value in peer.get(name, ())]

        def most(name: str) -> float:
            return max(peer[name] for peer in peers)

        return cls(
            seconds=joined("seconds"),
            averaging=joined("averaging"),
            sent=joined("payload"),
            peak=most("peak"),
            resting=most("resting"),
            host=most("host"),
            incomplete=sum(peer["incomplete"] for peer in peers),
            replicas=len({peer["fingerprint"] for peer in peers}),
            losses=[peer["losses"] for peer in peers],
        )


# -- in the peers ----------------------------------------------------------------------------------


def make_module(width: int, layers: int) -> Any:
    """Return a causal transformer whose output shares the embedding's matrix."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(CONTEXT, width)
            layer = nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
            mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
            self.register_buffer("mask", mask, persistent=False)
            nn.init.normal_(self.tokens.weight, std=0.02)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(tokens) + self.places.weight
            hidden = self.layers(hidden, mask=self.mask, is_causal=True)
            return hidden @ self.tokens.weight.T

    torch.manual_seed(0)
    return Transformer()


class Training:
    """Module, batch and loss of one peer, and what is read at the end of its training.

    Args:
        index: Number of the peer, which has a batch of its own.
        settings: Settings of the swarm.
    """

    def __init__(self, index: int, settings: dict[str, Any]) -> None:
        import torch

        self.module = make_module(settings["width"], settings["layers"])
        generator = torch.Generator().manual_seed(index)
        shape = (BATCH, CONTEXT + 1)
        self.batch = torch.randint(VOCABULARY, shape, generator=generator)
        self.losses: list[Any] = []
        self.found: dict[str, Any] = {}

    def loss(self, module: Any, batch: Any) -> Any:
        """Return the loss of the module on a batch of sequences."""
        import torch

        logits = module(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def read(self) -> None:
        """Note the memory, the parameters and the losses."""
        import torch

        from rayhive.averaging.fingerprint import fingerprint

        on_gpu = next(self.module.parameters()).is_cuda
        losses = [float(self.losses[0]), float(self.losses[-1])]
        self.losses.clear()
        self.found = {
            "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "resting": torch.cuda.memory_allocated() if on_gpu else 0,
            "host": sum(resident().values()),
            "fingerprint": fingerprint(list(self.module.parameters())).hex(),
            "losses": losses,
        }


def run_torch(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one rank in a plain loop; return its rounds and what was read at the end."""
    import torch
    import torch.distributed as dist

    training = Training(seat.index, settings)
    device = settings["device"]
    module = hooked(seat, training.module.to(device), settings["hook"], skip_dense=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=settings["precision"] == "fp16")
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    kind = kinds.get(settings["precision"], torch.float32)
    mixed = functools.partial(torch.autocast, device, kind, enabled=kind != torch.float32)
    stops, batches = Stops(WARM_UP, seat.interface), settings["batches"]
    for round_ in range(settings["rounds"] + WARM_UP):
        for batch in range(batches):
            averages = batch == batches - 1 and settings["averages"]
            with contextlib.nullcontext() if averages else module.no_sync():
                with mixed():
                    loss = training.loss(module, training.batch.to(device))
                scaler.scale(loss / batches).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        stops.note(round_ + 1)
    dist.barrier()
    training.read()
    return {**stops.result(), **training.found}


def run_rayhive(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer with the arguments of a study; return the same."""
    import torch

    from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager

    training = Training(seat.index, settings)
    averaging: list[float] = []
    payload: list[int] = []

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round" and fields["round"] > WARM_UP and "averaging_s" in fields:
            averaging.append(fields["averaging_s"])
            payload.append(fields["sent_bytes"])

    options = dict(settings["strategy"])
    if settings["factors"]:
        options["grad_averager_factory"] = functools.partial(
            RayhivePowerSGDAverager, averager_rank=RANK, device=settings["factors"]
        )
    result = peer_rounds(
        seat,
        settings["configuration"],
        Task(
            module=training.module,
            loss=training.loss,
            batch=training.batch,
            batch_size=BATCH,
            batches=settings["batches"],
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
        ),
        settings["rounds"],
        WARM_UP,
        at_end=training.read,
        on_event=note,
        trainer_options={
            "accelerator": "gpu" if settings["device"] == "cuda" else "cpu",
            "precision": PRECISIONS[settings["precision"]],
        },
        strategy_options=options,
    )
    return {**result, **training.found, "averaging": averaging, "payload": payload}


# -- measurement -----------------------------------------------------------------------------------


def measure(name: str, precision: str, on: Nodes, common: dict[str, Any]) -> Measured:
    """Run one variant once."""
    settings = {**common, "precision": precision}
    if name in TORCH:
        settings |= {"hook": TORCH[name], "averages": name != "computing alone"}
        return Measured.of(on.run(run_torch, settings, SWARM_S))
    settings["configuration"] = OURS[name]
    settings["factors"] = "cpu" if name.endswith("factors on the CPU") else None
    settings["strategy"] = {"trusted_network": name.endswith("trusted network")}
    return Measured.of(on.run(run_rayhive, settings, SWARM_S))


def print_row(name: str, row: Measured, found: dict[str, Measured], model: int) -> None:
    """Print the row of one variant, with its ratios to variants that ran before it."""
    p5, p50, p95 = np.percentile(row.seconds, [5, 50, 95])
    alone, rival = found.get("computing alone"), found.get(RIVAL.get(name, ""))
    cells = [
        name,
        f"{p50:.3f}",
        f"{p5:.3f}-{p95:.3f}",
        str(ratio(row.seconds, rival.seconds)) if rival else "",
        f"{p50 - np.median(alone.seconds):.3f}" if alone else "",
        f"{np.median(row.averaging):.3f}" if row.averaging else "",
        f"{np.mean(row.sent) / 1e6:.1f}" if row.sent else "",
        f"{row.resting / model:.1f}",
        f"{row.peak / 1e9:.2f}",
        f"{row.host / 1e9:.2f}",
        str(row.replicas),
        str(row.incomplete),
        f"{np.mean([first for first, _ in row.losses]):.2f}",
        f"{np.mean([last for _, last in row.losses]):.2f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def claims(precision: str, found: dict[str, Measured]) -> Iterable[Claim]:
    """Return the claims about one precision, if both variants ran."""
    if {"none", "DDP"} <= set(found):
        over = ratio(found["none"].seconds, found["DDP"].seconds)
        yield Claim(f"{precision}: rayhive over DDP", *over, "x", 1.1, at_least=False)


def main() -> None:
    """Measure and print."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=8, help="batches of a peer and round")
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds of a swarm")
    parser.add_argument("--width", type=int, default=768, help="of the transformer")
    parser.add_argument("--layers", type=int, default=12)
    names = [*TORCH, *OURS]
    parser.add_argument("--only", nargs="+", metavar="VARIANT", choices=names, default=names)
    kinds = list(PRECISIONS)
    parser.add_argument("--precisions", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() == 0:
        print("skipped: no GPU")
        return
    common = {name: getattr(arguments, name) for name in ("batches", "rounds", "device")}
    common |= {"width": arguments.width, "layers": arguments.layers}
    parameters = sum(p.numel() for p in make_module(arguments.width, arguments.layers).parameters())
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(
        f"{parameters:,} parameters, Adam, {arguments.peers} peers on one {device}, "
        f"{arguments.batches} batches of {BATCH} x {CONTEXT} tokens a peer and round, "
        f"{arguments.rounds} rounds; {conditions()}"
    )
    on, made, replicas = on_loopback(arguments.peers), list[Claim](), list[int]()
    for precision in arguments.precisions:
        print(f"\n{precision}")
        print(
            "| variant | s a round | p5-p95 | over DDP (95 %) | beyond computing [s] "
            "| all-reduce [s] | MB sent | copies on the GPU | peak there [GB] | host [GB] "
            "| replicas | incomplete | first loss | last |"
        )
        print("|---|" + "--:|" * 13, flush=True)
        found: dict[str, Measured] = {}
        for name in arguments.only:
            found[name] = measure(name, precision, on, common)
            print_row(name, found[name], found, 4 * parameters)
            if name in OURS:
                replicas.append(found[name].replicas)
        made += claims(precision, found)
    print()
    print_claims(*made)
    if replicas:
        print_fact("replicas of rayhive are equal to the bit", set(replicas) == {1})


if __name__ == "__main__":
    main()
