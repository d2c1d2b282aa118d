"""Rules for every registered workload. A new one is tested as soon as it is registered."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from rayhive.errors import ConfigError
from rayhive.registry import WORKLOADS
from rayhive.workloads.base import Target, Workload
from rayhive.workloads.data import SampleStream
from rayhive.workloads.loading import load_workload

# Arguments that make a workload small enough to try out; one without any is tried as it is.
SMALL: dict[str, dict[str, Any]] = {
    "lstm_wikitext2": {
        "vocabulary": 40,
        "width": 8,
        "context": 6,
        "train_samples": 90,
        "eval_samples": 10,
        "target": 20.0,
    },
    "resnet18_cifar10": {"width": 4, "train_samples": 90, "eval_samples": 20},
    "source_lm": {
        "width": 16,
        "layers": 1,
        "context": 64,
        "corpus_bytes": 100_000,
        "eval_windows": 10,
    },
}
BATCH = 8


@pytest.fixture(scope="module", params=WORKLOADS.names())
def workload(request: pytest.FixtureRequest) -> Workload:
    return load_workload(request.param, None, SMALL.get(request.param, {}))


def random_states() -> list[Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), kind, list(keys), rest, random.getstate()]


def batches(workload: Workload, count: int, **kwargs: int) -> list[list[torch.Tensor]]:
    given = {"peer": 0, "peers": 3, "batch_size": BATCH, "seed": 5} | kwargs
    return [list(batch) for batch in itertools.islice(workload.train_loader(**given), count)]


def equal(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def test_name_batch_size_target_and_data_are_declared(workload: Workload) -> None:
    assert WORKLOADS.get(workload.name) is type(workload)
    assert workload.data in ("real", "generated")
    assert isinstance(workload.target, Target)
    assert workload.default_batch_size >= 1


def test_the_same_seed_gives_the_same_parameters_and_disturbs_nothing(workload: Workload) -> None:
    before = random_states()
    one = workload.module(seed=3).state_dict()
    assert random_states() == before
    torch.rand(7)  # another peer's random state is elsewhere
    same, other = workload.module(seed=3).state_dict(), workload.module(seed=4).state_dict()
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_parameter_shapes_are_those_of_the_module(workload: Workload) -> None:
    parameters = workload.module(seed=1).parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert workload.parameter_shapes() == [tuple(parameter.shape) for parameter in trained]


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_shards_of_a_pass_are_disjoint_and_complete(workload: Workload, peers: int) -> None:
    orders = []
    for number in range(2):
        shards = []
        for peer in range(peers):
            loader = workload.train_loader(peer=peer, peers=peers, batch_size=BATCH, seed=5)
            stream = loader.dataset
            assert isinstance(stream, SampleStream)
            assert stream.size == workload.train_size()
            share = len(range(stream.offset, stream.size, stream.peers))
            shards.append(list(itertools.islice(stream, number * share, (number + 1) * share)))
        seen = [index for shard in shards for index in shard]
        assert sorted(seen) == list(range(stream.size))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        orders.append(seen)
    assert orders[0] != orders[1], "every pass has an order of its own"


def test_batches_are_decided_by_seed_and_peer(workload: Workload) -> None:
    before = random_states()
    first = batches(workload, 3)
    assert random_states() == before
    assert equal(first, batches(workload, 3))
    assert not equal(first, batches(workload, 3, seed=6))
    assert not equal(first, batches(workload, 3, peer=1))


def test_a_late_joiner_gets_a_share_of_its_own(workload: Workload) -> None:
    late = batches(workload, 3, peer=3)
    assert {len(part) for batch in late for part in batch} == {BATCH}
    assert not equal(late, batches(workload, 3, peer=0))
    assert equal(late, batches(workload, 3, peer=3))


def test_the_loader_is_endless_and_stays_in_this_process(workload: Workload) -> None:
    loader = workload.train_loader(peer=1, peers=2, batch_size=BATCH, seed=0)
    assert loader.num_workers == 0
    assert loader.batch_size == BATCH
    many = workload.train_size() // BATCH + 2  # more than two passes of half the samples
    assert sum(len(x) for x, _ in itertools.islice(loader, many)) == many * BATCH


def test_evaluation_is_deterministic_and_leaves_no_trace(workload: Workload) -> None:
    module = workload.module(seed=0)
    module.train()
    frozen = next(part for part in module.children())
    frozen.eval()
    modes = [part.training for part in module.modules()]
    parameters = [parameter.clone() for parameter in module.state_dict().values()]
    before = random_states()

    once, twice = workload.evaluate(module), workload.evaluate(module, device="cpu")

    assert once == twice
    assert random_states() == before
    assert [part.training for part in module.modules()] == modes
    after = module.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(parameters, after, strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_evaluation_gives_the_loss_and_the_metric_of_the_target(workload: Workload) -> None:
    measured = workload.evaluate(workload.module(seed=0))
    assert {"loss", workload.target.metric} <= measured.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in measured.values())
    untrained = measured[workload.target.metric]
    assert not workload.target.reached(untrained), "there is something to learn"


def test_a_plain_trainer_takes_steps(workload: Workload) -> None:
    module = workload.module(seed=0)
    before = [parameter.clone() for parameter in module.parameters()]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, workload.train_loader(peer=0, peers=1, batch_size=BATCH, seed=0))
    assert trainer.global_step == 2
    assert len(trainer.optimizers) == 1
    parameters = list(module.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
    moved = [not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)]
    assert all(moved), "every parameter gets a gradient"
    assert math.isfinite(workload.evaluate(module)["loss"])


def optimizer_of(module: LightningModule) -> tuple[torch.optim.Optimizer, Any]:
    configured: Any = module.configure_optimizers()
    if isinstance(configured, torch.optim.Optimizer):
        return configured, None
    assert configured["lr_scheduler"]["interval"] == "step", "one scheduler step is one round"
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]


def test_a_recreated_optimizer_gets_the_same_scheduler(workload: Workload) -> None:
    optimizer, scheduler = optimizer_of(workload.module(seed=0))
    again, _ = optimizer_of(workload.module(seed=0))
    make = workload.scheduler_fn()
    assert (make is None) == (scheduler is None)
    if make is None:
        return
    again = type(again)(workload.module(seed=0).parameters(), lr=again.defaults["lr"])
    other = make(again)
    for _ in range(50):
        assert other.get_last_lr()[0] == scheduler.get_last_lr()[0]
        for one, schedule in ((optimizer, scheduler), (again, other)):
            one.step()
            schedule.step()


def test_extra_tensors_are_the_buffers_of_the_module(workload: Workload) -> None:
    module = workload.module(seed=0)
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    extra = workload.extra_tensors(module)
    assert [id(tensor) for tensor in extra] == [id(buffer) for buffer in buffers]


def test_an_unknown_argument_names_the_nearest(workload: Workload) -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload(workload.name, None, {"targets": 1.0, "no_such_thing_at_all": 2})
    assert {problem.key for problem in caught.value.problems} == {
        "workload.args.targets",
        "workload.args.no_such_thing_at_all",
    }
    hints = {problem.key: problem.nearest for problem in caught.value.problems}
    assert hints["workload.args.targets"] == "target"


def test_the_target_can_be_given(workload: Workload) -> None:
    given = SMALL.get(workload.name, {}) | {"target": 1}  # an integer does for a float
    if workload.target.metric == "perplexity":
        given["target"] = 2
    assert load_workload(workload.name, None, given).target.value == given["target"]
