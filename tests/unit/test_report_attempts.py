"""A row of the table and the sections of the page tell of the same attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.api import load
from rayhive.errors import ConfigError
from rayhive.report.comparison import compare
from rayhive.report.loggers import runs
from rayhive.report.page.run_data import read_run
from rayhive.report.render import results_text
from rayhive.report.results import load_results
from tests.fixtures.logs import Log, make_spec, write_run


def two_codes(folder: Path, state: str = "completed") -> Path:
    """Write a replicate that ran again with other code of the user, whose row is kept apart."""
    run = write_run(folder, [Log(make_spec(code="old"), losses=(3.0, 2.0), state=state)])
    place = run / "trials" / "0" / "r0-none"
    (place / "events.jsonl").rename(place / "events.attempt-0.jsonl")
    return write_run(folder, [Log(make_spec(code="new", attempt=1), losses=(1.0, 0.5))])


def test_attempts_with_other_code_have_their_own_curves(tmp_path: Path) -> None:
    run = two_codes(tmp_path / "run")
    results = load_results(run)
    shown = {
        each.row["code"]: (each.spec.code, each.curve[-1].loss)
        for each in read_run(run, results).replicates
    }
    losses = {row["code"]: row["final_loss"] for row in results.rows}
    assert losses == {"old": pytest.approx(2.01), "new": pytest.approx(0.51)}
    assert shown == {code: (code, loss) for code, loss in losses.items()}


def test_attempts_with_other_code_have_their_own_stories_and_pictures(tmp_path: Path) -> None:
    run = load(two_codes(tmp_path / "run", state="failed"))
    stories = {
        str(row["code"]): story
        for row, story in zip(run.results.rows, run.stories(always=True), strict=True)
    }
    titles = {code: story.lines[0].partition(": ")[2] for code, story in stories.items()}
    assert titles["old"].startswith("failed") and titles["new"].startswith("completed")
    assert {code: story.wrong for code, story in stories.items()} == {"old": True, "new": False}
    pictures = {code: story.write_picture() for code, story in stories.items()}
    assert {code: path.name for code, path in pictures.items()} == {
        "old": "timeline.attempt-0.html",
        "new": "timeline.html",
    }
    assert "failed" in pictures["old"].read_text(encoding="utf-8")
    assert "failed" not in pictures["new"].read_text(encoding="utf-8").partition("<main")[2]


def test_runs_with_other_code_have_names_of_their_own_in_an_export(tmp_path: Path) -> None:
    run = two_codes(tmp_path / "run")
    exported = {each.name: each for each in runs(run, load_results(run))}
    assert set(exported) == {"0-r0-none-old", "0-r0-none-new"}
    for each in exported.values():
        assert each.points[-1].values["loss"] == pytest.approx(each.final["final_loss"], abs=0.01)


def test_a_run_with_two_codes_is_not_compared(tmp_path: Path) -> None:
    run = two_codes(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"one version of the user's code; it has new, old"):
        compare(run, run)


def test_a_damaged_earlier_attempt_leaves_the_finished_one_everywhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log(make_spec(replicate=n)) for n in (0, 1)])
    (run / "trials/0/r0-none/events.attempt-0.jsonl").write_text('{"kind":"x"\n')
    results = load_results(run)
    assert len(results.rows) == len(read_run(run, results).replicates) == 2
    assert {row.n for row in compare(run, run).rows} == {2}
    assert len(list(runs(run, results))) == 2
    text = " ".join(results_text(results).split())
    assert "events.attempt-0.jsonl" in text
    assert "Another attempt at that replicate finished, and counts." in text
    assert "runs that replicate again" not in text
