"""Local steps in Lightning: a peer alone that adopts its own progress trains like plain Lightning.

With the outer learning rate 1 and without momentum, the outer parameters of a peer without company
become its local ones. Whatever Lightning does in an inner step has to have the same effect then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

BATCHES = 24
#: Precision and batches that Lightning accumulates for one step.
CASES = [("32-true", 2), ("bf16-true", 1), ("bf16-mixed", 1), ("16-mixed", 1)]


def fits(
    folder: str, precision: str, accumulated: int, hivemind: bool, warm_up: bool = False
) -> dict[str, Any]:
    """Train; return the loss of each batch, the rates, and what a checkpoint keeps."""
    from functools import partial

    import torch
    from lightning.pytorch import Callback

    from rayhive import HivemindStrategy
    from tests.integration.toy import ALONE, Regression, flat, loader, trainer

    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    events: list[tuple[str, dict[str, Any]]] = []
    options = {
        "accumulate_grad_batches": accumulated,
        "gradient_clip_val": 0.05,
        "precision": precision,
        "max_steps": BATCHES // accumulated,
    }

    made = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7)
    if warm_up:
        made = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=6)

    def scheduled(optimizer: Any) -> Any:
        return {"scheduler": made(optimizer), "interval": "step"}

    strategy: Any = "auto"
    if hivemind:
        strategy = HivemindStrategy(
            **{**ALONE, "target_batch_size": 32},
            local_steps=4,  # 128 samples: 8 batches
            outer_lr=1.0,
            outer_momentum=0.0,
            scheduler_fn=made if warm_up else None,
            on_event=lambda kind, fields: events.append((kind, fields)),
        )
    module = Regression(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), scheduler=scheduled
    )
    fitted = trainer(strategy, Rates(), **options)
    fitted.fit(module, loader())
    path = Path(folder) / f"{hivemind}.ckpt"
    fitted.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    state = {k: v for k, v in saved["optimizer_states"][0]["state"].items() if k != "local_epoch"}
    return {
        "losses": module.losses,
        "rates": rates,
        "weights": flat(module),
        "saved": [v for t in saved["state_dict"].values() for v in t.flatten().tolist()],
        "moments": [float(each["exp_avg"].norm()) for each in state.values()],
        "rounds": [f["samples"] for kind, f in events if kind == "round"],
    }


@pytest.mark.parametrize(
    ("precision", "accumulated"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_inner_steps_are_those_of_plain_lightning(
    tmp_path: Path, precision: str, accumulated: int
) -> None:
    given = {"folder": str(tmp_path), "precision": precision, "accumulated": accumulated}
    plain, local = (call(fits, hivemind=each, **given) for each in (False, True))
    wanted, found = plain.result(120), local.result(120)
    assert found["rounds"] == [128, 128, 128]
    assert found["rates"] == pytest.approx(wanted["rates"]) and len(set(wanted["rates"])) > 3
    tolerance = 1e-4 if precision == "32-true" else 1e-2
    for key in ("losses", "weights", "saved", "moments"):
        assert found[key] == pytest.approx(wanted[key], rel=tolerance, abs=tolerance / 10), key


def test_a_given_schedule_replaces_that_of_the_module(tmp_path: Path) -> None:
    """A study gives a copy of the module's own; the rates must not be reduced twice."""
    given = {"folder": str(tmp_path), "precision": "32-true", "accumulated": 1, "warm_up": True}
    plain, local = (call(fits, hivemind=each, **given).result(120) for each in (False, True))
    assert local["rates"] == pytest.approx(plain["rates"])
    assert local["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def saved_in_validation(folder: str) -> dict[str, Any]:
    """Save while the outer step of the last round runs in the background."""
    import time

    import torch
    from lightning.pytorch import Callback

    from rayhive import HivemindStrategy
    from tests.integration.toy import ALONE, Regression, loader, trainer

    path = Path(folder) / "validated.ckpt"
    seen: dict[str, Any] = {}

    class Validated(Regression):
        def validation_step(self, batch: Any, index: int) -> Any:
            return self.training_step(batch, index)

    class Save(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            outer = trainer.optimizers[0].state_averager.optimizer
            step = outer.step

            def slow(*args: Any, **kwargs: Any) -> Any:
                time.sleep(0.5)
                return step(*args, **kwargs)

            outer.step = slow

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            local = trainer.optimizers[0].local_steps
            seen["before"] = [v for t in local.outer_parameters for v in t.flatten().tolist()]
            trainer.save_checkpoint(path)
            state = torch.load(path, weights_only=False)["state_dict"]
            seen["saved"] = [v for t in state.values() for v in t.flatten().tolist()]
            trainer.optimizers[0].settle()
            seen["outer"] = [v for t in local.outer_parameters for v in t.flatten().tolist()]

    strategy = HivemindStrategy(
        **{**ALONE, "target_batch_size": 32},
        local_steps=4,
        delay_optimizer_step=True,
        delay_state_averaging=True,
    )
    options = {"max_steps": 8, "val_check_interval": 8, "limit_val_batches": 1}
    trainer(strategy, Save(), **options).fit(Validated(), loader(), loader())
    return seen


def test_a_checkpoint_of_a_validation_has_the_round_that_ended_before(tmp_path: Path) -> None:
    found = call(saved_in_validation, folder=str(tmp_path)).result(120)
    assert found["before"] != found["outer"], "nothing was under way"
    assert found["saved"] == found["outer"]


def resumed(folder: str) -> dict[str, Any]:
    """Save in the middle of a round, and go on from the checkpoint in a new trainer."""
    import torch
    from lightning.pytorch import Callback

    from rayhive import HivemindStrategy
    from tests.integration.toy import ALONE, Regression, flat, loader, trainer

    path = Path(folder) / "middle.ckpt"
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            optimizer = trainer.optimizers[0]
            outer = optimizer.state_averager.optimizer
            seen["start"] = flat(module)
            seen["round"] = optimizer.local_epoch
            inner = optimizer.local_steps.inner.state.values()
            seen["inner"] = [float(each["momentum_buffer"].norm()) for each in inner]
            seen["outer"] = [float(each["momentum_buffer"].norm()) for each in outer.state.values()]

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 11 and not path.exists():  # after a round, and 3 batches more
                optimizer = trainer.optimizers[0]
                seen["local"], seen["common"] = flat(module), []
                for tensor in optimizer.local_steps.outer_parameters:
                    seen["common"] += tensor.flatten().tolist()
                trainer.save_checkpoint(path)
                seen["after"] = flat(module)

    results = []
    for checkpoint in (None, path):
        seen = {}
        strategy = HivemindStrategy(**{**ALONE, "target_batch_size": 32}, local_steps=4)
        fitted = trainer(strategy, Look(), max_steps=12)
        fitted.fit(Regression(), loader(), ckpt_path=checkpoint, weights_only=False)
        results.append(seen)
    torch.set_num_threads(1)
    return {"first": results[0], "second": results[1]}


@pytest.mark.slow
def test_a_checkpoint_holds_the_outer_parameters_and_both_optimizers(tmp_path: Path) -> None:
    found = call(resumed, folder=str(tmp_path)).result(120)
    first, second = found["first"], found["second"]
    assert first["local"] != first["common"], "there was no progress to leave out"
    assert first["after"] == first["local"], "saving has changed the local parameters"
    assert second["start"] == first["common"]
    assert second["round"] == 1
    assert all(value > 0 for value in (*second["inner"], *second["outer"]))
