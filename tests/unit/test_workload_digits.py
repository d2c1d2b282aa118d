from __future__ import annotations

import itertools

import pytest
import torch

from rayhive.workloads.digits import Digits


def rounds_to_target(workload: Digits, seed: int, at_most: int) -> int | None:
    """Train in this process on rounds of 256 samples and look every fifth round."""
    module = workload.module(seed)
    optimizer = module.configure_optimizers()
    loader = workload.train_loader(peer=0, peers=1, batch_size=256, seed=seed)
    for number, batch in enumerate(itertools.islice(loader, at_most), start=1):
        optimizer.zero_grad()
        module.training_step(batch, number).backward()
        optimizer.step()
        if number % 5 == 0 and workload.target.reached(workload.evaluate(module)["accuracy"]):
            return number
    return None


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_plain_training_reaches_the_target(optimizer: str) -> None:
    target = 0.97 if optimizer == "adam" else 0.95
    workload = Digits(optimizer=optimizer, target=target)
    rounds = rounds_to_target(workload, seed=0, at_most=60)
    assert rounds is not None, "60 rounds of 256 samples are enough"
    assert rounds > 5, "a target that is reached at once measures nothing"


def test_the_split_is_stratified_and_loses_no_image() -> None:
    (_, train), (_, held_out) = Digits().splits
    everything, kept = (torch.bincount(labels, minlength=10) for labels in (train, held_out))
    assert len(train) + len(held_out) == 1797
    share = kept / (kept + everything)
    assert ((share - 0.2).abs() < 0.01).all()


def test_no_image_is_in_both_splits_and_values_are_in_range() -> None:
    (train, _), (held_out, _) = Digits().splits
    assert train.min() == 0
    assert train.max() == 1
    apart = torch.cdist(held_out.flatten(1), train.flatten(1))
    assert apart.min() > 0


def test_the_model_has_the_documented_size_and_no_buffers() -> None:
    module = Digits().module(seed=0)
    assert sum(parameter.numel() for parameter in module.parameters()) == 151_498
    assert list(module.buffers()) == []
    wide = sum(torch.Size(shape).numel() for shape in Digits(width=44).parameter_shapes())
    assert 250_000 < wide < 320_000
