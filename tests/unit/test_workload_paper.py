from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rayhive.workloads.lstm_wikitext2 import LstmWikitext2
from rayhive.workloads.paper import PaperSchedule, rounds_per_pass
from rayhive.workloads.resnet18_cifar10 import Resnet18Cifar10, batch_norms


def test_the_rate_climbs_with_the_workers_and_falls_twice() -> None:
    schedule = PaperSchedule(workers=16, rounds_per_pass=24, decay_passes=(150, 250))
    assert schedule(0) == 1
    assert schedule(60) == 8.5  # half of five passes: half way from 1 to 16
    assert schedule(120) == schedule(24 * 150 - 1) == 16
    assert schedule(24 * 150) == pytest.approx(1.6)
    assert schedule(24 * 250) == pytest.approx(0.16)


def test_one_worker_needs_no_warm_up() -> None:
    schedule = PaperSchedule(workers=1, rounds_per_pass=10, decay_passes=(60, 80))
    assert {schedule(rounds) for rounds in range(600)} == {1.0}
    assert schedule(600) == pytest.approx(0.1)


def test_a_pass_has_the_rounds_of_the_paper() -> None:
    assert rounds_per_pass(50_000, workers=16, batch=128) == 24
    assert rounds_per_pass(100, workers=16, batch=128) == 1


def configured(module: Any) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    answer = module.configure_optimizers()
    return answer["optimizer"], answer["lr_scheduler"]["scheduler"]


def test_resnet_has_the_published_optimizer() -> None:
    workload = Resnet18Cifar10(width=2, train_samples=128 * 16 * 2, eval_samples=8, workers=16)
    module = workload.module(0)
    optimizer, scheduler = configured(module)
    assert type(optimizer) is torch.optim.SGD
    decayed, plain = optimizer.param_groups
    assert decayed["momentum"] == plain["momentum"] == 0.9
    assert decayed["nesterov"]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (1e-4, 0.0)
    norms = {id(p) for norm in batch_norms(module) for p in norm.parameters()}
    assert {id(parameter) for parameter in plain["params"]} == norms
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))
    for _ in range(5 * 2):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.6, 1.6])


def test_the_lstm_has_the_published_optimizer_and_clips_each_micro_batch() -> None:
    workload = LstmWikitext2(vocabulary=30, width=8, train_samples=64, eval_samples=8)
    module = workload.module(0)
    optimizer, _ = configured(module)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (1.25, 0.0, 0.0)

    clipped: list[tuple[float, str]] = []

    def clip(_: Any, gradient_clip_val: float, gradient_clip_algorithm: str) -> None:
        clipped.append((gradient_clip_val, gradient_clip_algorithm))

    module.clip_gradients = clip
    module.configure_gradient_clipping(optimizer, None, None)
    module.configure_gradient_clipping(optimizer, 2.0, "value")
    assert clipped == [(0.4, "norm"), (2.0, "value")]


@pytest.mark.parametrize(
    ("workload", "batch", "rounds", "clip"),
    [
        (Resnet18Cifar10(width=8, train_samples=256, eval_samples=64), 32, 40, None),
        (
            LstmWikitext2(vocabulary=500, width=32, workers=16, train_samples=256),
            32,
            120,
            0.4,
        ),
    ],
    ids=["resnet18_cifar10", "lstm_wikitext2"],
)
def test_the_loss_falls_on_generated_data(
    workload: Any, batch: int, rounds: int, clip: float | None
) -> None:
    assert workload.data == "generated"
    module = workload.module(0)
    optimizer, scheduler = configured(module)
    losses = []
    loader = workload.train_loader(peer=0, peers=1, batch_size=batch, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, part in enumerate(itertools.islice(loader, rounds)):
            optimizer.zero_grad()
            loss = module.training_step(part, number)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    # Batches differ by less than a tenth of a nat around the trend.
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3
