"""A scenario as its user runs it: real peers, real kills, and what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayhive.events import read_events

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.swarm, pytest.mark.slow]


def rayhive(*arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rayhive", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_killed_peer_is_replaced_and_everything_still_holds(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    given = ["--peers", "3", "--set", "budget.seconds_per_replicate=40", "--no-twin"]
    done = rayhive("scenario", "run", "kill-one", "--seed", "3", *given, "--out", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    place = run / "trials" / "0" / "r0-kill-one"
    events = list(read_events(place / "events.jsonl"))
    kinds = [event["kind"] for event in events]
    assert [kinds.count(f"fault_{what}") for what in ("fired", "verified", "healed")] == [1, 1, 1]
    (target,) = next(event["lives"] for event in events if event["kind"] == "fault_fired")
    # the replacement has taken part in a round of all
    later = [e for e in events if e["kind"] == "round" and e["peer"] == f"{target}.1"]
    assert any(e.get("group_size") == 3 and e["samples"] for e in later)
    invariants = {e["name"]: e["ok"] for e in events if e["kind"] == "invariant"}
    assert len(invariants) == 9 and all(invariants.values())
    told = " ".join(done.stdout.split())
    for said in (f"f0 kill on {target} fires", "f0 verified", "contributing", "no_orphans"):
        assert said in told
    # and a recorded plan runs again as it was
    plan = (place / "plan.json").read_text()
    repeated = rayhive("replay", str(run), "0", "--out", str(again))
    assert repeated.returncode == 0, repeated.stdout + repeated.stderr
    assert (again / "plan.json").read_text() == plan
    assert json.loads(plan)["faults"][0]["kind"] == "kill"
    table = rayhive("results", str(again), "--format", "json")
    (row,) = json.loads(table.stdout)
    assert row["n"] == 1 and row["faults_verified"] == 1


def test_pairs_go_on_without_a_killed_peer_and_stay_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("local_steps=4", "group_size=2", "outer_momentum=0.5")
    given = [each for setting in settings for each in ("--set", f"space.{setting}")]
    given += ["--peers", "4", "--set", "budget.seconds_per_replicate=40", "--no-twin"]
    done = rayhive("scenario", "run", "kill-one", "--seed", "1", *given, "--out", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    events = list(read_events(run / "trials" / "0" / "r0-kill-one" / "events.jsonl"))
    assert [e["kind"] for e in events].count("fault_verified") == 1
    assert not [e for e in events if e["kind"] == "state_round"], "parameters were averaged"
    rounds = [e for e in events if e["kind"] == "round"]
    sizes = {e["group_size"] for e in rounds if e["outcome"] == "averaged"}
    assert {2} <= sizes <= {2, 3}
    fired = next(e for e in events if e["kind"] == "fault_fired")
    (target,) = fired["lives"]
    later = [e for e in rounds if e["peer"] == f"{target}.1" and e["outcome"] == "averaged"]
    assert any(e["samples"] for e in later)
    checked = {e["name"]: e for e in events if e["kind"] == "invariant"}
    assert all(e["ok"] for e in checked.values()), checked
    assert checked["replicas_agree"]["checked"] > 100
