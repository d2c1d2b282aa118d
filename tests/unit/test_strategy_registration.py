"""`import rayhive` is light, and still makes the strategy known to Lightning by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rayhive

PREPARED = """
import sys
{before}
import rayhive
from lightning.pytorch.strategies import StrategyRegistry
import lightning.pytorch.strategies as table
assert {{"hivemind", "collaborative", "ddp"}} <= set(StrategyRegistry), list(StrategyRegistry)
assert "hivemind" not in sys.modules and "rayhive.strategy.strategy" not in sys.modules
assert StrategyRegistry["hivemind"]["init_params"] == {{"target_batch_size": 8192}}
assert type(table.__loader__).__name__ == type(table.__spec__.loader).__name__ == "SourceFileLoader"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("rayhive")]
from rayhive.strategy import registration
registration.register_with_lightning()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "before", [pytest.param("", marks=pytest.mark.slow), "import lightning.pytorch"]
)
def test_the_names_are_registered_in_any_order_of_imports(before: str) -> None:
    run(PREPARED.format(before=before))


def test_the_package_is_light() -> None:
    heavy = '("torch", "lightning", "hivemind", "ray", "optuna", "pandas", "pydantic")'
    run(f"import rayhive, sys; assert not set({heavy}) & set(sys.modules)")


def test_older_and_newer_names_are_one_class() -> None:
    from rayhive.strategy.strategy import HivemindStrategy

    assert rayhive.HivemindStrategy is rayhive.CollaborativeStrategy is HivemindStrategy
    assert {"HivemindStrategy", "CollaborativeStrategy"} <= set(dir(rayhive))
    assert HivemindStrategy.strategy_name == "hivemind"
    with pytest.raises(AttributeError, match="no attribute 'HiveMindStrategy'"):
        rayhive.HiveMindStrategy  # noqa: B018
