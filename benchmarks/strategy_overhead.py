"""What the strategy costs a peer: samples per second against plain Lightning in the same run.

Claim: one peer with a compute-bound module (at least 20 ms a batch) keeps 97 % of the samples per
second of plain Lightning with the same gradient accumulation. Published swarms keep 48-78 %
(arXiv 2306.03163).

Both variants train the same module on the same data with the same trainer: ``strategy`` has
``target_batch_size = K * batch`` where ``plain`` has ``accumulate_grad_batches = K``, so both
step the optimizer equally often. Each run is a fresh process; the variants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.runs import ratio_of_runs
from benchmarks.swarm import ROOT, conditions, die_with_parent, end_on_sigterm

VARIANTS = ("plain", "strategy")
BOUND = 0.97
#: A batch that takes less is not compute-bound [s].
SHORTEST_BATCH = 0.02
FEATURES, CLASSES = 256, 10
#: Width of the hidden layers and samples of a batch.
SIZES = {"cpu": (768, 1024), "cuda": (4096, 32768)}


def run_variant(settings: dict[str, Any]) -> dict[str, Any]:
    """Train in this process; return the seconds of each round after the warm-up."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from rayhive import HivemindStrategy

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    on_gpu = settings["device"] == "cuda"
    width, batch = SIZES[settings["device"]]
    per_round, rounds = settings["batches_per_round"], settings["warm_up"] + settings["rounds"]

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

    class Clock(Callback):
        def __init__(self) -> None:
            self.ended: list[float] = []
            self.used: list[float] = []

        def on_train_batch_end(self, *arguments: Any) -> None:
            if (arguments[-1] + 1) % per_round == 0:
                if on_gpu:
                    torch.cuda.synchronize()
                self.ended.append(time.perf_counter())
                self.used.append(time.process_time())

    strategy: dict[str, Any] = {"accumulate_grad_batches": per_round}
    if settings["variant"] == "strategy":
        swarm = HivemindStrategy(
            target_batch_size=per_round * batch,
            run_id="overhead",
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            use_relay=False,
        )
        strategy = {"strategy": swarm}
    batches = [(torch.randn(batch, FEATURES), torch.randint(CLASSES, (batch,))) for _ in range(8)]
    data = [batches[index % 8] for index in range(per_round * rounds)]
    clock = Clock()
    module = Perceptron()
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        **strategy,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    done = swarm.optimizer.local_epoch if "strategy" in strategy else trainer.global_step
    if not 0.9 * rounds <= done <= rounds:
        raise RuntimeError(f"{done} optimizer steps were done instead of {rounds}")
    return {
        "steps": done / rounds,
        "seconds": np.diff(clock.ended)[settings["warm_up"] - 1 :].tolist(),
        "cpu_seconds": np.diff(clock.used)[settings["warm_up"] - 1 :].tolist(),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def measure(settings: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run one variant in a fresh process."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HIVEMIND_LOGLEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, __file__, "--worker", json.dumps(settings)]
    done = subprocess.run(command, env=environment, timeout=timeout, text=True, capture_output=True)
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise RuntimeError(f"{settings['variant']} ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=sorted(SIZES), help="default: cuda if there is one")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batches-per-round", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        die_with_parent()
        print(json.dumps(run_variant(json.loads(arguments.worker))), flush=True)
        return

    end_on_sigterm()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _, batch = SIZES[device]
    settings = {
        "device": device,
        "rounds": arguments.rounds,
        "batches_per_round": arguments.batches_per_round,
        "warm_up": 4,
    }
    seconds: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    cpu: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    steps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repeat in range(arguments.repeats):
        for variant in VARIANTS if repeat % 2 else reversed(VARIANTS):
            result = measure({**settings, "variant": variant}, timeout=120)
            seconds[variant].append(result["seconds"])
            cpu[variant] += result["cpu_seconds"]
            steps[variant].append(result["steps"])
    per_round = arguments.batches_per_round
    print(
        f"one peer on {device}, {result['parameters']:,} parameters, Adam, batches of {batch}, "
        f"{per_round} batches a round, {arguments.repeats} runs of {arguments.rounds} rounds each"
    )
    print(conditions())
    rates = {}
    for variant, runs in seconds.items():
        rates[variant] = [per_round * batch / np.mean(run) for run in runs]
        low, middle, high = np.percentile(np.concatenate(runs), [5, 50, 95]) / per_round * 1e3
        print(
            f"{variant:>9}: {np.mean(rates[variant]):8.0f} samples/s   a batch: "
            f"p50 {middle:.1f} ms (p5 {low:.1f}, p95 {high:.1f}), "
            f"of the process's CPU {np.mean(cpu[variant]) / per_round * 1e3:.1f} ms   "
            f"optimizer steps done {np.mean(steps[variant]):.1%}"
        )
    shortest = np.median(np.concatenate(seconds["plain"])) / per_round
    if shortest < SHORTEST_BATCH:
        raise SystemExit(f"a batch takes only {shortest * 1e3:.1f} ms: not compute-bound")
    ratio, low, high = ratio_of_runs(rates["strategy"], rates["plain"])
    text = f"samples/s of the strategy over plain Lightning, one peer on {device}"
    print_claims(Claim(text, ratio, low, high, "x", BOUND, at_least=True))


if __name__ == "__main__":
    main()
