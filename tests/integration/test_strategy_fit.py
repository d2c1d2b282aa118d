"""Batches and gradients in one fit on one real peer: counts, precision, clipping."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import ALONE, Regression, UntilRound, fit_alone, flat, loader
from tests.integration.toy import trainer as make_trainer

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]


def batches_are_counted() -> dict[str, Any]:
    """Epochs of 40 samples in batches of 16, 16 and 8; one of four batches has no gradient."""
    import torch
    from torch.utils.data import DataLoader

    from rayhive.strategy.strategy import StrategyError

    class Counting(Regression):
        skip = False
        seen: list[int] = []  # noqa: RUF012 - replaced in each round

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.skip and self.trainer.global_step % 4 == 1:
                return None
            self.seen = [*self.seen, len(batch[0])]
            return super().training_step(batch, batch_idx)

    def samples(skip: bool = False, **strategy: Any) -> list[tuple[int, list[int]]]:
        rounds: list[tuple[int, list[int]]] = []
        module = Counting()
        module.skip = skip

        def on_event(kind: str, fields: dict[str, Any]) -> None:
            if kind == "round":
                rounds.append((fields["samples"], module.seen))
                module.seen = []

        settings = {"target_batch_size": 40, "on_event": on_event, **strategy}
        fit_alone(settings, module, rounds=3, data=loader(samples=40))
        return rounds

    class Words(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch == ["two", "words"]
            return self.net(torch.ones(2, 8)).sum()

    def words(**strategy: Any) -> str:
        try:
            data = DataLoader(["two", "words"] * 100, batch_size=2, collate_fn=list)
            fit_alone(strategy, Words(), rounds=1, data=data)
        except StrategyError as error:
            return str(error)
        return "trained"

    return {
        "counted": samples(),
        "given": samples(batch_size=20),
        "skipped": samples(skip=True),
        "words": [words(), words(batch_size=2)],
    }


def test_samples_are_counted_as_they_are() -> None:
    result = call(batches_are_counted).result()
    error, trained = result.pop("words")
    assert "Please provide the batch size to the Strategy." in error
    assert "HivemindStrategy(batch_size=...)" in error
    assert trained == "trained"
    for way, rounds in result.items():
        assert len(rounds) == 3
        for samples, batches in rounds:
            assert samples >= 40
            assert samples == (20 * len(batches) if way == "given" else sum(batches)), way
        assert {16, 8} == {size for _, batches in rounds for size in batches}


def gradients_of_each_way() -> dict[str, Any]:
    """The weights after three rounds, for every way to get the same gradients there."""
    import torch
    from lightning.pytorch.plugins.precision import MixedPrecision

    from rayhive import HivemindStrategy

    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def reference(batches: list[int]) -> list[float]:
        """Return the weights after rounds of so many batches each, without a swarm."""
        module, data = Validated(), iter(loader())
        optimizer = module.configure_optimizers()
        for count in batches:
            optimizer.zero_grad()
            for inputs, targets in (next(data) for _ in range(count)):
                (torch.nn.functional.mse_loss(module.net(inputs), targets) / count).backward()
            optimizer.step()
        return flat(module)

    def distance(strategy: dict[str, Any] | None = None, **options: Any) -> float:
        batches: list[int] = []

        def on_event(kind: str, fields: dict[str, Any]) -> None:
            if kind == "round":
                batches.append(fields["samples"] // 16)

        module = Validated()
        trainer = make_trainer(
            HivemindStrategy(**{**ALONE, "on_event": on_event, **(strategy or {})}),
            UntilRound(3),
            # a validation in the middle of a round clears gradients, if it is let
            val_check_interval=3,
            limit_val_batches=1,
            **options,
        )
        trainer.fit(module, loader(), loader(samples=16))
        assert len(batches) == 3 and min(batches) >= 1  # else all gradients were refused
        pairs = zip(flat(module), reference(batches), strict=True)
        return max(abs(a - b) for a, b in pairs)

    def fp16() -> Any:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    reuse = {"reuse_grad_buffers": True}
    return {
        "plain": distance(),
        "reused": distance(reuse),
        "offloaded": distance({"offload_optimizer": True}),
        "fp16": distance(plugins=[fp16()]),
        "fp16, reused": distance(reuse, plugins=[fp16()]),
        "bf16, reused, offloaded": distance(
            {**reuse, "offload_optimizer": True}, precision="bf16-mixed"
        ),
        "16-true": distance(precision="16-true"),
        "bf16-true": distance(precision="bf16-true"),
        "bf16-true, offloaded": distance({"offload_optimizer": True}, precision="bf16-true"),
        "64-true, offloaded": distance({"offload_optimizer": True}, precision="64-true"),
    }


def test_every_way_applies_the_same_gradients() -> None:
    for way, distance in call(gradients_of_each_way).result().items():
        assert distance < (0.02 if "16" in way else 1e-5), way


def clipping() -> dict[str, Any]:
    """Returns the gradient norms that moved the weights, and how often clipping was asked for."""
    import torch

    class Clipped(Regression):
        calls = 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            super().configure_gradient_clipping(*args, **kwargs)

    class Failing(Regression):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            raise ArithmeticError("cannot clip")

    def norms(**strategy: Any) -> tuple[list[float], int]:
        module, moves = Clipped(), []
        last = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()

        def at_round(trainer: Any) -> None:
            nonlocal last
            now = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
            moves.append(float((now - last).norm()))
            last = now

        fit_alone(strategy, module, rounds=3, at_round=at_round, gradient_clip_val=0.01)
        assert "configure_gradient_clipping" not in vars(module)
        return moves, module.calls

    error = ""
    try:
        fit_alone({}, Failing(), rounds=3)
    except ArithmeticError as caught:
        error = str(caught)
    return {
        "plain": norms(),
        "reused": norms(reuse_grad_buffers=True),
        "offloaded": norms(offload_optimizer=True),
        "error": error,
    }


def test_the_gradient_of_a_round_is_clipped() -> None:
    result = call(clipping).result()
    assert result.pop("error") == "cannot clip"
    for way, (norms, calls) in result.items():
        assert norms == pytest.approx([0.01] * 3, rel=1e-3), way
        assert calls == 3, way


def manual_optimization() -> dict[str, Any]:
    import hivemind

    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            assert isinstance(optimizer, hivemind.Optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    module, samples = Manual(), []

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            samples.append(fields["samples"])

    trainer = fit_alone({"on_event": on_event}, module, rounds=4)
    return {"batches": trainer.global_step, "samples": samples, "losses": module.losses}


def test_manual_optimization_counts_each_step_as_a_batch() -> None:
    result = call(manual_optimization).result()
    assert len(result["samples"]) == 4
    assert sum(result["samples"]) == 16 * result["batches"]
    assert result["losses"][-1] < result["losses"][0]
