"""Overhead of the strategy: samples per second compared with plain Lightning in the same run.

Claim: one peer with a compute-bound module (at least 20 ms a batch) keeps 97 % of the samples per
second of plain Lightning with the same gradient accumulation. Published swarms keep 48-78 %
(arXiv 2306.03163).

All variants train the same module on the same data with the same trainer: ``strategy`` has
``target_batch_size = K * batch`` and ``plain`` has ``accumulate_grad_batches = K``, so they step
the optimizer equally often. ``reusing`` is the strategy with ``reuse_grad_buffers=True``: it
accumulates in ``parameter.grad``, as plain Lightning does. It is printed only; the claim is about
the strategy without options.

All variants run in fresh processes and take turns of a few rounds, so that other load affects all
of them. During a turn all processes of the other variants are stopped, so the background processes
of a swarm slow down only the turns of the strategy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.runs import ratio_of_turns
from benchmarks.swarm import ROOT, conditions, die_with_parent, end_on_sigterm

VARIANTS = ("plain", "strategy", "reusing")
#: Prefix of a worker's lines, which Lightning's lines lack.
MARK = "turn: "
BOUND = 0.97
#: Shortest batch that counts as compute-bound [s].
SHORTEST_BATCH = 0.02
FEATURES, CLASSES = 256, 10
#: Device to the width of the hidden layers and the samples of a batch.
SIZES = {"cpu": (768, 1024), "cuda": (4096, 32768)}


def run_variant(settings: dict[str, Any]) -> None:
    """Train in this process, turn by turn; print the time of each, and wait for the next."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from rayhive import HivemindStrategy

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    on_gpu = settings["device"] == "cuda"
    width, batch = SIZES[settings["device"]]
    per_round, per_turn = settings["batches_per_round"], settings["rounds_per_turn"]
    rounds = per_turn * (settings["turns"] + 1)  # the first one is for warming up

    class Perceptron(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, width), torch.nn.ReLU(),
                torch.nn.Linear(width, width), torch.nn.ReLU(),
                torch.nn.Linear(width, CLASSES),
            )  # fmt: skip

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class Turns(Callback):
        began = used = 0.0

        def on_train_batch_end(self, *arguments: Any) -> None:
            if (arguments[-1] + 1) % (per_round * per_turn):
                return
            if on_gpu:
                torch.cuda.synchronize()
            seconds, cpu = time.perf_counter() - self.began, time.process_time() - self.used
            print(f"{MARK}{json.dumps([seconds, cpu])}", flush=True)
            sys.stdin.readline()
            self.began, self.used = time.perf_counter(), time.process_time()

    strategy: dict[str, Any] = {"accumulate_grad_batches": per_round}
    if settings["variant"] != "plain":
        swarm = HivemindStrategy(
            target_batch_size=per_round * batch,
            run_id="overhead",
            reuse_grad_buffers=settings["variant"] == "reusing",
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            use_relay=False,
        )
        strategy = {"strategy": swarm}
    batches = [(torch.randn(batch, FEATURES), torch.randint(CLASSES, (batch,))) for _ in range(8)]
    data = [batches[index % 8] for index in range(per_round * rounds)]
    module = Perceptron()
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Turns()],
        **strategy,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    done = swarm.optimizer.local_epoch if "strategy" in strategy else trainer.global_step
    if not 0.9 * rounds <= done <= rounds:
        raise RuntimeError(f"{done} optimizer steps were done instead of {rounds}")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"{MARK}{json.dumps([done / rounds, parameters])}", flush=True)


@contextlib.contextmanager
def worker(settings: dict[str, Any], log: TextIO) -> Iterator[subprocess.Popen[str]]:
    """Run one variant in a fresh process for the duration of the ``with`` block."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HIVEMIND_LOGLEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        # Depending on the heap, glibc returns memory between batches: up to 5 ms of page faults
        # per batch, and more often in the smaller process.
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
    }
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
        os.killpg(process.pid, signal.SIGCONT)
        process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def take_turn(process: subprocess.Popen[str]) -> list[float]:
    """Let a worker and its forked processes run for a turn; return its measurements."""
    assert process.stdin is not None
    os.killpg(process.pid, signal.SIGCONT)
    process.stdin.write("go\n")
    process.stdin.flush()
    try:
        return read(process)
    finally:
        os.killpg(process.pid, signal.SIGSTOP)


def read(process: subprocess.Popen[str]) -> list[float]:
    """Return the next measurements that a worker prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            values: list[float] = json.loads(line.removeprefix(MARK))
            return values
    raise RuntimeError("a worker ended early")


def take_turns(settings: dict[str, Any], turns: int) -> dict[str, list[list[float]]]:
    """Run the variants in turns; return the measurements of each."""
    measured: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        try:
            workers = {
                name: stack.enter_context(worker({**settings, "variant": name}, log))
                for name in VARIANTS
            }
            for process in workers.values():
                read(process)  # warm-up
            for process in workers.values():
                os.killpg(process.pid, signal.SIGSTOP)
            for turn in range(turns + 1):
                for name in VARIANTS if turn % 2 else reversed(VARIANTS):
                    measured[name].append(take_turn(workers[name]))
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
    return measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=sorted(SIZES), help="default: cuda if there is one")
    parser.add_argument("--turns", type=int, default=20, help="turns of each process")
    parser.add_argument("--rounds-per-turn", type=int, default=3)
    parser.add_argument("--batches-per-round", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions with fresh processes")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        die_with_parent()
        run_variant(json.loads(arguments.worker))
        return

    end_on_sigterm()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _, batch = SIZES[device]
    settings = {
        "device": device,
        "turns": arguments.turns,
        "rounds_per_turn": arguments.rounds_per_turn,
        "batches_per_round": arguments.batches_per_round,
    }
    turns: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    ends: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.repeats):
        for variant, measured in take_turns(settings, arguments.turns).items():
            turns[variant] += measured[:-1]
            ends[variant].append(measured[-1])
    print(
        f"one peer on {device}, {ends['plain'][0][1]:,} parameters, Adam, batches of {batch}, "
        f"{arguments.batches_per_round} batches a round, {arguments.rounds_per_turn} rounds a "
        f"turn, {arguments.repeats} times {arguments.turns} turns; {conditions()}"
    )
    seconds = {}
    batches = arguments.batches_per_round * arguments.rounds_per_turn
    for variant, values in turns.items():
        seconds[variant], cpu = np.array(values).T / batches
        p5, p50, p95 = np.percentile(seconds[variant], [5, 50, 95]) * 1e3
        print(
            f"{variant:>9}: {batch / seconds[variant].mean():8.0f} samples/s   a batch: "
            f"p50 {p50:.1f} ms (p5 {p5:.1f}, p95 {p95:.1f}), of the process's CPU "
            f"{cpu.mean() * 1e3:.1f} ms   "
            f"optimizer steps done {np.mean([end[0] for end in ends[variant]]):.1%}"
        )
    if np.median(seconds["plain"]) < SHORTEST_BATCH:
        raise SystemExit("a batch of plain Lightning is too short: not compute-bound")
    for name in VARIANTS[1:]:
        pairs = np.median(seconds["plain"] / seconds[name])
        ratio, low, high = ratio_of_turns(seconds["plain"], seconds[name])
        print(
            f"{name}: {ratio:.3f}x plain's samples/s (95 % {low:.3f}-{high:.3f}), median of the "
            f"ratios of neighbouring turns {pairs:.3f}x"
        )
    ratio, low, high = ratio_of_turns(seconds["plain"], seconds["strategy"])
    text = f"samples/s of the strategy over plain Lightning, one peer on {device}"
    print_claims(Claim(text, ratio, low, high, "x", BOUND, at_least=True))


if __name__ == "__main__":
    main()
