"""What a report recommends under which conditions, and its map over link and failure rate."""

from __future__ import annotations

import re
from pathlib import Path

from rayhive.report.page.conditions import faults_text
from rayhive.spec import Configuration
from rayhive.spec.fault_plan import At, FaultPlan, PlannedFault
from rayhive.spec.swarm import Link, NodeClass, SwarmConfig
from tests.fixtures.faulted import ALL, Story, kill_and_restart, planned
from tests.fixtures.logs import PAYLOAD, STATE, Log, make_spec, write_run
from tests.fixtures.report_pages import CODECS, faulted_page, page_of, sweep, write_over_links


def shaped(run: Path, rate: float, faulted: bool) -> None:
    """Write two configurations over links of one rate, of which a slow link prefers the second."""
    for trial, codec in enumerate(("none", "float16")):
        for seed in (0, 1):
            story = kill_and_restart(
                trial=trial + int(rate), replicate=seed, configuration=Configuration(codec=codec),
            ) if faulted else Story(
                trial=trial + int(rate), replicate=seed, configuration=Configuration(codec=codec),
            )  # fmt: skip
            everybody = ("peer-0", "peer-1", "peer-2")
            if not faulted:
                slow = 3.0 if (codec == "none") == (rate < 50) else 1.0
                slow *= 1 + 0.01 * seed * (trial + 1)
                story.rounds(*(slow * n for n in (1, 2, 3, 4)), peers=everybody)
                story.finish(5 * slow, everybody)
                story.end(6 * slow)
            write_over_links(run, story, rate)


def test_the_map_shows_the_winner_of_each_link_and_failure_rate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], {"samples_per_s": "maximize"})
    for rate in (10.0, 100.0):
        for with_faults in (False, True):
            shaped(run, rate, with_faults)
    page = page_of(run)
    classes = [each.attributes.get("class", "") for each in page.all("rect")]
    assert sum(name.startswith("cell") for name in classes) > 500 and "hatched" in classes
    words = page.words("map")
    assert re.search("none 10 0 float16 > 99 %", words) and re.search(
        "none 100 0 none > 99 %", words
    )
    assert "extrapolated: outside the measured range" in words
    summary = page.words("recommendation")
    assert "not known in advance, with link: all: 10 Mbit/s, 10 ms: float16" in summary
    assert "not known in advance, with link: all: 100 Mbit/s, 10 ms: none" in summary
    # equal under faults, in all replicates
    assert "story 10 92.3 none not known" in words


def test_the_first_section_says_on_what_and_under_which_faults_was_measured(tmp_path: Path) -> None:
    link = Link(rate_mbit=20, delay_ms=10)
    classes = {"spot": NodeClass(count=2, link=link, preemptible=True)}
    swarm = SwarmConfig(peers=2, target_batch_size=128, node_classes=classes)
    words = page_of(sweep(tmp_path / "run", swarm=swarm)).words("recommendation")
    assert "links: spot: 20 Mbit/s, 10 ms (preemptible); 4 configurations." in words
    both = faulted_page(tmp_path / "faulted").words("recommendation")
    assert "1 configuration under 2 scenarios." in both
    assert "Without faults none" in both
    assert "Scenario story: kill of 1 peer at round 4 none" in both


def test_an_open_choice_names_the_first_and_the_ranges_of_all(tmp_path: Path) -> None:
    logs = []
    for trial, codec in enumerate(CODECS[:3]):
        for seed in (0, 1):
            spec = make_spec(trial=trial, replicate=seed, configuration=Configuration(codec=codec))
            first = 2.0 + 0.5 * ((trial + seed) % 2)
            logs.append(Log(spec, seconds=(first, 0.5, 0.6, 0.7)))
    words = page_of(write_run(tmp_path / "run", logs)).words("recommendation")
    assert re.search(
        r"The choice lies among 3 of 3: \w+ \(\d+ %\), \w+ \(\d+ %\), \w+ \(\d+", words
    )
    sent = f"{(PAYLOAD + STATE) / 64:.2f}"  # in each of four rounds of 128 samples
    assert f"payload_bytes_per_sample from {sent} to {sent} B and time_to_target_s from" in words
    assert "says how many replicates would tell" in words


def test_faults_are_counted_where_the_plans_of_the_replicates_differ(tmp_path: Path) -> None:
    def words(*seconds: float) -> str:
        logs = []
        for n, at in enumerate(seconds):
            fault = PlannedFault(id="f0", kind="kill", who=(f"peer-{n}",), at=At(seconds=at))
            plan = FaultPlan(peers=2, scenario="story", faults=(fault,))
            logs += [
                Log(make_spec(trial=0, replicate=n)),
                Log(make_spec(trial=0, replicate=n, scenario="story", plan=plan)),
            ]
        run = write_run(tmp_path / str(seconds), logs)
        return page_of(run).words("recommendation")

    assert "story: kill of 1 peer at 4 s" in words(4, 4)  # of another peer
    assert "story: 1 fault planned for a replicate (1 kill)" in words(4, 5)


def test_many_faults_of_a_plan_are_counted_by_kind() -> None:
    faults = [
        PlannedFault(id=f"f{n}", kind=kind, who=(who,), at=At(seconds=n), heal_after_s=2)
        for n, (kind, who) in enumerate([("kill", "peer-1"), ("kill_node", "node-0")] * 2)
    ]
    few, many = (FaultPlan(peers=2, faults=tuple(faults[:n])) for n in (2, 4))
    assert faults_text(few) == (
        "kill of 1 peer at 0 s, healed after 2 s; kill_node of 1 node at 1 s, healed after 2 s"
    )
    assert (
        faults_text(many)
        == "4 faults planned for a replicate (2 kill, 2 kill_node), each healed after 2 s"
    )


def test_many_faults_have_a_rate(tmp_path: Path) -> None:
    story = kill_and_restart()
    assert story.spec.plan is not None
    faults = tuple(planned(number, round=4 + number) for number in range(4))
    plan = story.spec.plan.model_copy(update={"faults": faults})
    story.spec = story.spec.model_copy(update={"plan": plan})
    run = write_run(tmp_path / "run", [], {"samples_per_s": "maximize"})
    twin = Story()
    twin.rounds(1.0, 2.0, peers=ALL)
    twin.finish(2.5, ALL)
    twin.end(3.0)
    for each in (story, twin):
        write_over_links(run, each, 10)
    words = page_of(run).words("recommendation")
    # one of them fired in 39 s of peers: 3,600 / 39
    assert "4 faults planned for a replicate (4 kill); 92.3 per peer and hour of training" in words


def test_without_rates_the_map_says_what_is_missing(tmp_path: Path) -> None:
    words = page_of(sweep(tmp_path / "run")).words("map")
    assert "No map: this run has no measured rate of a link" in words
    assert "svg" not in words
