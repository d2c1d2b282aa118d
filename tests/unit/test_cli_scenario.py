from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.cli import main
from rayhive.cluster.node import capabilities
from rayhive.faults.target import CAPABILITIES
from rayhive.registry import SCENARIOS
from rayhive.sweep.resolve import replicate_seed

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine lacks nothing but links."""
    here = dict.fromkeys(CAPABILITIES) | {"link": "no testbed is up"}
    monkeypatch.setattr(capabilities, "here", lambda: here)


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["scenario", *arguments]) == code
    return capsys.readouterr().out


def test_scenarios_are_listed_with_what_they_do_need_and_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = out_of(capsys, "list")
    assert "No fault." in out
    rows: dict[str, dict[str, Any]] = {
        row["scenario"]: row for row in json.loads(out_of(capsys, "list", "--format", "json"))
    }
    members = rows["preempt-notice"]["stands_for"]
    assert members == [f"preempt-notice-{seconds}" for seconds in (0, 5, 15, 30)]
    assert {*rows, *members} == set(SCENARIOS.names())
    for row in rows.values():
        assert row["about"][:40] in out  # what is long is folded
        assert row["seconds"] >= 30 and row["peers"] >= row["least_peers"] >= 1
    assert rows["kill-one"]["here"] and rows["kill-one"]["needs"] == ["signals"]
    assert not rows["split-brain"]["here"]
    assert "no testbed is up" in rows["split-brain"]["lacking"]["partition"]
    assert "not here: partition: it has to shape" in out
    assert main(["scenario", "list", "--format", "csv"]) == 2


def test_the_seed_of_the_study_counts_without_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump({"name": "s", "workload": {"name": "digits"}, "seed": 5}))
    given = {
        0: [],
        7: ["--set", "seed=7"],
        5: ["--config", str(study)],
        9: ["--seed", "9", "--set", "seed=7", "--config", str(study)],
    }
    for seed, options in given.items():
        shown = json.loads(out_of(capsys, "show", "kill-one", *options, "--format", "json"))
        assert shown["plan"]["seed"] == replicate_seed(seed, 0)


def test_a_plan_is_shown_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("show", "spot-g4dn", "--seed", "3", "--peers", "6", "--format", "json")
    shown = json.loads(out_of(capsys, *arguments))
    assert json.loads(out_of(capsys, *arguments)) == shown
    plan = shown["plan"]
    assert (plan["scenario"], plan["seed"], plan["peers"]) == ("spot-g4dn", replicate_seed(3, 0), 6)
    canonical = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(canonical.encode()).hexdigest() == shown["hash"]
    text = out_of(capsys, "show", "spot-g4dn", "--seed", "3", "--peers", "6")
    assert shown["hash"][:16] in text
    for fault in plan["faults"]:
        assert f"preempt {', '.join(fault['who'])}" in text
    assert text.count("peer-") >= 6 + len(plan["faults"]) and "█" in text and "140 s" in text
    other = json.loads(out_of(capsys, "show", "spot-g4dn", "--seed", "4", "--format", "json"))
    assert other["hash"] != shown["hash"]


def test_what_breaks_nothing_and_what_stands_for_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "no faults" in out_of(capsys, "show", "none")
    assert json.loads(out_of(capsys, "show", "none", "--format", "json"))["plan"]["faults"] == []
    grid = json.loads(out_of(capsys, "show", "preempt-notice", "--format", "json"))
    notices = [each["plan"]["faults"][0]["args"]["notice_s"] for each in grid]
    assert notices == [0, 5, 15, 30]
    assert out_of(capsys, "show", "preempt-notice").count("preempt-notice-") == 4


def test_a_study_and_single_fields_replace_the_scenarios_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.yaml"
    study = {"name": "a", "workload": {"name": "digits"}, "swarm": {"peers": 3}}
    file.write_text(yaml.safe_dump(study))
    arguments = ("show", "chaos", "--config", str(file), "--set", "scenario_args.chaos.faults=3")
    plan = json.loads(out_of(capsys, *arguments, "--format", "json"))["plan"]
    assert (plan["peers"], len(plan["faults"])) == (3, 3)
    assert "A seeded mix of 3 faults" in out_of(capsys, *arguments)
    assert main(["scenario", *arguments, "--set", "budget.seconds_per_replicate=9"]) == 2
    assert "longer budget" in capsys.readouterr().err


def test_what_the_machine_cannot_do_is_shown_and_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scenario", "show", "partition-heal"]) == 2
    said = capsys.readouterr()
    assert "partition" in said.out and "no testbed is up" in said.err


def test_a_trace_that_is_out_of_order_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("0,add,a\n0,add,b\n600000,remove,b\n300000,add,c\n")
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"about": "x", "plan": {"trace": {"file": "t.csv"}}}))
    assert main(["scenario", "show", str(file)]) == 0
    assert "sorted by time: row 4" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scenario", "show", "kil-one"]) == 2
    assert "did you mean 'kill-one'?" in capsys.readouterr().err
