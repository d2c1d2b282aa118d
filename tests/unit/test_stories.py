"""The stories of a run: which replicates have one, and which of them went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.api import load
from tests.fixtures.faulted import kill_and_restart
from tests.fixtures.logs import Log, make_spec, write_run


@pytest.mark.parametrize("state", ["completed", "timed_out", "pruned", "skipped"])
def test_a_replicate_that_the_pruner_ended_did_not_go_wrong(tmp_path: Path, state: str) -> None:
    story = kill_and_restart(trial=1)
    story.events[-1]["state"] = state
    calm = Log(make_spec(), state=state)
    run = load(write_run(tmp_path / "run", [calm, story]))
    (told,) = run.stories()
    assert told.folder.name == "r0-story" and not told.wrong
    assert [each.wrong for each in run.stories(always=True)] == [False, False]


@pytest.mark.parametrize("state", ["failed", "diverged", "invalid", "lost"])
def test_a_replicate_that_failed_went_wrong(tmp_path: Path, state: str) -> None:
    run = load(write_run(tmp_path / "run", [Log(make_spec(), state=state)]))
    (told,) = run.stories()
    assert told.wrong and state in told.lines[0]
