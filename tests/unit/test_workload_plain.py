"""A plain ``LightningModule`` as a workload."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayhive.errors import ConfigError
from rayhive.sweep.objectives import Charges
from rayhive.sweep.resolve import resolve
from rayhive.workloads.base import Target
from rayhive.workloads.loading import load_workload

SOURCE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler


def numbers(size):
    return TensorDataset(torch.randn(size, 4), torch.arange(size).float())


class Line(LightningModule):
    def __init__(self, rate=0.1):
        super().__init__()
        self.rate, self.layer = rate, torch.nn.Linear(4, 1)

    def training_step(self, batch, i):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Own(Line):
    def train_dataloader(self):
        return DataLoader(numbers(50), batch_size=5, shuffle=True, num_workers=3)


class Validated(Own):
    def validation_step(self, batch, i):
        self.log("val_loss", self.training_step(batch, i))
        self.log("numbers", batch[1].mean())

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(6, 4), torch.arange(6.0)), batch_size=4)


class Scheduled(Own):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}


class Prepared(Own):
    def setup(self, stage):
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.steps = 4

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": warm}


class Tuned(Own):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 40), torch.nn.Linear(40, 1)
        self.backbone.requires_grad_(False)

    def setup(self, stage):
        self.layer.requires_grad_(False)

    def training_step(self, batch, i):
        return self.head(self.backbone(batch[0])).square().mean()


class Stream(Line):
    def train_dataloader(self):
        class Endless(IterableDataset):
            def __iter__(self):
                yield torch.ones(4)

        return DataLoader(Endless(), batch_size=5)


class Weighted(Line):
    def train_dataloader(self):
        return DataLoader(numbers(50), batch_size=5, sampler=WeightedRandomSampler([1.0] * 50, 50))


class Late(Own):
    def setup(self, stage):
        self.head = torch.nn.Linear(1, 1)


class Lazy(Own):
    def configure_model(self):
        self.head = torch.nn.Linear(1, 1)


class Broken(Own):
    def training_step(self, batch, i):
        return self.layer(batch[0].reshape(-1, 3)).mean()


class Adversarial(Own):
    def configure_optimizers(self):
        return [torch.optim.SGD(part, lr=0.1) for part in ([self.layer.weight], [self.layer.bias])]


class Plateau(Own):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "x"}}


class TwoSchedules(Own):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.ExponentialLR
        return [optimizer], [decay(optimizer, 0.5), {"scheduler": decay(optimizer, 0.9)}]


class Statistics(Own):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4,), float("-inf")))
"""
WITH_DATA = """
from lightning.pytorch import LightningDataModule, LightningModule
from my_modules import Line, numbers
from torch.utils.data import DataLoader

class Bare(Line):
    pass

class Data(LightningDataModule):
    def __init__(self, size=20):
        super().__init__()
        self.size = size

    def setup(self, stage):
        self.samples = numbers(self.size)

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in the current folder, as a user has them beside the study."""
    (tmp_path / "my_modules.py").write_text(SOURCE)
    (tmp_path / "with_data.py").write_text(WITH_DATA)
    (tmp_path / "two_data.py").write_text(f"{WITH_DATA}\nclass More(Data):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_modules", "with_data", "two_data"):
        sys.modules.pop(name, None)


def refusal(path: str, *, check: bool = False, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        workload = load_workload(None, path, **given)
        if check:
            workload.check()
    (problem,) = caught.value.problems
    return str(problem)


def drawn(workload: Any, peer: int, count: int, peers: int = 2) -> list[int]:
    loader = workload.train_loader(peer=peer, peers=peers, batch_size=5, seed=3)
    batches = [batch[1].int().tolist() for batch in itertools.islice(loader, -(-count // 5))]
    return list(itertools.chain(*batches))[:count]


def test_peers_draw_disjoint_samples_in_a_seeded_order() -> None:
    workload = load_workload(None, "my_modules:Own")
    assert workload.train_size() == 45  # a tenth is held out
    assert workload.default_batch_size == 5
    first, second = drawn(workload, 0, 23), drawn(workload, 1, 22)
    assert len({*first, *second}) == 45
    assert first == drawn(load_workload(None, "my_modules:Own"), 0, 23)
    assert first != sorted(first)


def test_random_data_and_parameters_are_equal_on_all_peers() -> None:
    torch.manual_seed(1)
    one = load_workload(None, "my_modules:Own")
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    two = load_workload(None, "my_modules:Own")
    modules = [workload.module(seed=5) for workload in (one, two)]
    batches = [
        next(iter(w.train_loader(peer=0, peers=1, batch_size=5, seed=0))) for w in (one, two)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(modules[0].layer.weight, modules[1].layer.weight)
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(one.module(seed=6).layer.weight, modules[0].layer.weight)


def test_what_validation_step_logs_is_measured() -> None:
    workload = load_workload(None, "my_modules:Validated", target=Target("numbers", 9, "max"))
    module = workload.module(seed=0)
    values = workload.evaluate(module)
    expected = module.layer(torch.ones(1, 4)).square().item()
    assert values.keys() == {"loss", "val_loss", "numbers"}
    assert values["val_loss"] == values["loss"] == pytest.approx(expected, rel=1e-6)
    assert values["numbers"] == 2.5
    assert values == workload.evaluate(module)
    assert module.training
    assert set(workload.metrics()) == {"loss", "val_loss", "numbers"}


def test_without_validation_the_training_loss_of_held_out_samples_is_measured() -> None:
    workload = load_workload(None, "my_modules:Own")
    workload.check()
    assert set(workload.evaluate(workload.module(seed=0))) == {"loss"}


@pytest.mark.parametrize("path", ["with_data:Bare", "my_modules:Line"])
def test_a_data_module_is_named_or_the_only_one_of_the_file(path: str) -> None:
    data = "with_data:Data" if path == "my_modules:Line" else None
    args = {"size": 40} if data else None
    workload = load_workload(None, path, data=data, data_args=args)
    assert workload.train_size() == (36 if data else 18)
    assert workload.default_batch_size == 2


def test_modules_of_lightnings_demos_are_workloads() -> None:
    demos = "lightning.pytorch.demos.boring_classes"
    own = load_workload(None, f"{demos}:BoringModel")
    own.check()
    assert own.train_size() == 64
    assert set(own.metrics()) == {"loss", "x"}
    other = load_workload(None, f"{demos}:BoringModel", data=f"{demos}:BoringDataModule")
    assert set(other.metrics()) == {"loss", "x"}


def test_lightnings_demo_transformer_is_a_workload(tmp_path: Path) -> None:
    """Its ``prepare_data`` keeps a text that is there, and downloads WikiText-2 otherwise."""
    text = tmp_path / "data" / "wikitext-2.txt"
    text.parent.mkdir()
    text.write_text("\n".join("the cat sat on the mat and looked at me" for _ in range(70)))
    workload = load_workload(
        None, "lightning.pytorch.demos:LightningTransformer", {"vocab_size": 50}
    )
    workload.check()
    # windows of 35 of the 70 lines' 770 tokens, without the last; a tenth of them is held out
    assert workload.train_size() == 21 - 2
    assert set(workload.metrics()) == {"loss"}


def test_a_scheduler_is_made_again_for_another_optimizer() -> None:
    workload = load_workload(None, "my_modules:Scheduled", {"rate": 0.8})
    make = workload.scheduler_fn()
    assert make is not None
    optimizer = torch.optim.SGD(workload.module(seed=0).parameters(), lr=0.8)
    scheduler, rates = make(optimizer), []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.5, 0.8, 0.4])
    assert load_workload(None, "my_modules:Own").scheduler_fn() is None


def test_layers_of_configure_model_are_equal_and_made_once() -> None:
    workload = load_workload(None, "my_modules:Lazy")
    one, two = workload.module(seed=1), workload.module(seed=1)
    head = one.head
    one.configure_model()
    assert one.head is head
    assert torch.equal(head.weight, two.head.weight)


def test_running_statistics_are_averaged_and_constants_are_not() -> None:
    workload = load_workload(None, "my_modules:Statistics")
    module = workload.module(seed=0)
    assert [tensor.shape for tensor in workload.extra_tensors(module)] == [(4,), (4,)]
    assert workload.extra_tensors(module)[0] is module.norm.running_mean


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("my_modules:Line", {}, "workload.data: None is not valid: the import path of"),
        ("two_data:Bare", {}, "one of two_data:Data, two_data:More"),
        ("with_data:Bare", {"data_args": {"sise": 3}}, "workload.data_args.sise"),
        ("my_modules:Own", {"data_args": {"size": 3}}, "absent without workload.data"),
        ("my_modules:Own", {"data": "my_modules:Line"}, "workload.data: 'my_modules:Line'"),
        ("my_modules:Own", {"args": {"rat": 1}}, "workload.args.rat: 'rat'"),
        ("my_modules:Stream", {}, "samples are numbered, not a stream"),
        ("my_modules:Weighted", {}, "it has a WeightedRandomSampler"),
        ("my_modules:Late", {}, "those that setup makes would differ between peers"),
    ],
)
def test_unusable_modules_are_refused(path: str, given: dict[str, Any], words: str) -> None:
    assert words in refusal(path, **given)


def test_a_module_is_tried_before_anything_starts() -> None:
    assert "whose training works; it raised RuntimeError" in refusal(
        "my_modules:Broken", check=True
    )
    assert "multiple optimizers" in refusal("my_modules:Adversarial", check=True)
    for name in ("Plateau", "TwoSchedules"):
        path = f"my_modules:{name}"
        assert "at most one scheduler that needs no metric" in refusal(path, check=True)
    assert load_workload(None, "my_modules:TwoSchedules").scheduler_fn() is None
    target = Target("acc", 1, "max")
    assert (
        "workload.target.metric: 'acc' is not valid: a metric that the evaluation gives: loss"
        in (refusal("my_modules:Own", check=True, target=target))
    )


def test_what_setup_makes_is_there_in_evaluations_and_schedules() -> None:
    workload = load_workload(None, "my_modules:Prepared")
    workload.check()
    module = workload.module(0)
    module.setup("fit")
    assert "loss" in workload.evaluate(module)
    make = workload.scheduler_fn()
    assert make is not None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    make(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_frozen_parameters_are_not_planned_for() -> None:
    study = {"name": "s", "workload": {"import": "my_modules:Tuned"}}
    resolved = resolve({**study, "objectives": {"final_loss": "minimize"}})
    assert resolved.workload.shapes == ((1, 40), (1,))
    with pytest.raises(ConfigError, match="fragments"):
        resolve({**study, "space": {"local_steps": 4, "fragments": 3}})


def test_keys_of_plain_modules_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"workload\.target.*absent with a Workload"):
        load_workload("digits", target=Target("loss", 1, "min"))


def test_objectives_are_checked_against_the_metrics() -> None:
    study = {"name": "s", "workload": {"import": "my_modules:Validated"}}
    with pytest.raises(ConfigError, match=r"workload\.target.*metrics are loss, numbers, val_loss"):
        resolve(study)
    with pytest.raises(ConfigError, match=r"did you mean 'metric\.numbers'"):
        resolve({**study, "objectives": {"metric.number": "maximize"}})
    with pytest.raises(ConfigError, match=r"objectives\.metric\.loss.*did you mean 'final_loss'"):
        resolve({**study, "objectives": {"metric.loss": "minimize"}})
    resolved = resolve({**study, "objectives": {"metric.numbers": "maximize"}})
    assert resolved.config.objectives == {"metric.numbers": "maximize"}
    assert resolved.workload.data == "own"


def test_the_module_of_the_documentation_is_a_workload(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
    (tmp_path / "my_modules.py").write_text(text.split("```python\n")[1].split("```")[0])
    workload = load_workload(None, "my_modules:Net", {"lr": 0.05})
    workload.check()
    assert set(workload.metrics()) == {"loss", "val_loss"}


def test_a_failure_is_charged_worse_than_every_value_of_a_metric() -> None:
    ways = {"metric.gain": "maximize", "metric.error": "minimize"}
    config = resolve({"name": "s", "workload": {"name": "digits"}}).config
    charges = Charges(config.model_copy(update={"objectives": ways}))
    assert charges.of("metric.gain") < 0 < charges.of("metric.error")
    rows = [(-3.0, 1.0), (-1.0, 4.0)]
    charges.learn(
        {"state": "completed", "metric.gain": gain, "metric.error": error} for gain, error in rows
    )
    assert charges.of("metric.gain") == -6.0
    assert charges.of("metric.error") == 8.0
