"""Number of replicates for a wanted difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rayhive.cli.main import main
from rayhive.errors import ConfigError
from rayhive.metrics.power import power, replicates_needed, shown_effect
from rayhive.report.replicates import needed, share, spread_in
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, write_run

LOSSES = ((0.50, 0.62, 0.70), (0.80, 0.90, 1.01), (0.40, 0.50, 0.62))
STUDY = """
name: tiny
workload: {name: digits}
space: {codec: [none, float16]}
enqueue: [{codec: none}, {codec: float16}]
replicates: 3
objectives: {final_loss: minimize, time_to_target_s: minimize}
budget: {trials: 2, samples_per_replicate: 1024, seconds_per_replicate: 30}
"""


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_the_pairs_of_a_published_table(effect: float, pairs: int) -> None:
    """Paired t-test, two-sided 5 %, power 80 %: G*Power 3.1 (Faul et al., 2007)."""
    assert replicates_needed(effect) == pairs
    assert power(pairs, effect) >= 0.8 > power(pairs - 1, effect)


def test_the_effect_that_replicates_show_is_the_one_that_needs_them() -> None:
    for n in (2, 3, 10):
        effect = shown_effect(n)
        assert effect is not None and power(n, effect) == pytest.approx(0.8, abs=1e-4)
    assert shown_effect(2) == pytest.approx(11.5, abs=0.1)  # about t(0.975, 1) · 1.2816 / √2
    assert shown_effect(1) is None
    assert replicates_needed(1e-4) is None


def test_differences_of_times_are_factors_and_more_rows_take_more_replicates() -> None:
    loss, time = needed(
        {"final_loss": (0.1, "given"), "time_to_target_s": (0.1, "given")}, 1.0, 3, rivals=5
    )
    assert loss.one_pair == replicates_needed(1.0 / (0.1 * math.sqrt(2)))
    assert time.one_pair == replicates_needed(math.log(2) / (0.1 * math.sqrt(2)))
    assert loss.comparisons == 10 and loss.all_rows == replicates_needed(
        1.0 / (0.1 * math.sqrt(2)), 0.05 / 10
    )
    assert loss.shown is not None and time.shown is not None
    assert time.shown == pytest.approx(math.expm1(loss.shown))


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.1", 0.1), (0.25, 0.25)])
def test_shares(text: str | float, value: float) -> None:
    assert share("--difference", text) == value


@pytest.mark.parametrize("text", ["ten", "0", "-5%", "inf", ""])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--difference"):
        share("--difference", text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three configurations of three replicates; the seed adds some 0.1 to each loss."""
    codecs = ("none", "float16", "uniform8")
    return write_run(
        tmp_path / "run",
        [
            Log(
                spec=make_spec(
                    trial=trial, replicate=n, configuration=Configuration(codec=codecs[trial])
                ),
                losses=(2.0, loss),
            )
            for trial, values in enumerate(LOSSES)
            for n, loss in enumerate(values)
        ],
        {"final_loss": "minimize"},
    )


def test_the_spread_of_a_past_run_is_without_the_effect_of_the_seed(run: Path) -> None:
    spread, source = spread_in(load_results(run), "final_loss")
    shown = [[loss + 0.01 for loss in line] for line in LOSSES]  # the mean over two peers
    relative = [[loss / (sum(line) / 3) - 1 for loss in line] for line in shown]
    seeds = [sum(column) / 3 for column in zip(*relative, strict=True)]
    squares = [
        (each - seed) ** 2 for line in relative for each, seed in zip(line, seeds, strict=True)
    ]
    assert spread == pytest.approx(math.sqrt(sum(squares) / 4))  # (3 - 1)·(3 - 1)
    assert source == "measured in study: 3 rows"
    unknown = spread_in(load_results(run), "time_to_target_s")  # equal in all replicates
    assert unknown[0] is None and "show no spread" in unknown[1]
    (item,) = needed({"time_to_target_s": unknown}, 0.1, 3, rivals=2)
    assert (item.spread, item.one_pair, item.shown) == (None, None, None)


def test_the_spread_is_that_of_the_rows_and_not_of_baselines(run: Path) -> None:
    spread, source = spread_in(load_results(run), "final_loss")
    for n, loss in enumerate((0.1, 2.0, 5.0)):
        Log(make_spec(trial=None, baseline="ddp", replicate=n), losses=(2.0, loss)).write(run)
    results = load_results(run)
    assert "ddp" in {row["baseline"] for row in results.folded}
    assert spread_in(results, "final_loss") == (spread, source)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(STUDY)
    assert main(["plan", "study.yaml", "--difference", "20%", "--spread", "10%"]) == 0
    text = capsys.readouterr().out
    assert "a difference of 20 % between two rows takes 7 replicates" in text
    assert "the 3 replicates of the study show" in text
    assert main(["plan", "study.yaml", "--difference", "20%"]) == 2  # neither spread nor past run
    assert "--spread" in capsys.readouterr().err
