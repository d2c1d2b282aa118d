"""HTML report: its sections, missing values, hostile texts, and structure for everybody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from rayhive.report.page.run_data import read_run
from rayhive.report.page.svg import Scale
from rayhive.report.page.table import page_table
from rayhive.report.page.write import report_html, write_report
from rayhive.report.render import results_text
from rayhive.report.results import Results, load_results
from rayhive.spec import Configuration
from tests.fixtures.html import Page
from tests.fixtures.logs import Log, make_spec, write_replicate, write_run
from tests.fixtures.report_pages import CODECS, faulted_page, page_of, sweep

HOSTILE = """</script><script>alert("1")</script><img src=x onerror='alert(2)'>&amp;"""
SECTIONS = (
    "recommendation", "table", "front", "loss", "time", "faults", "importance", "map",
    "provenance", "reading",
)  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Return the report of a sweep."""
    return page_of(sweep(tmp_path_factory.mktemp("swept") / "run"))


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Return the report of a scenario with its twin."""
    return faulted_page(tmp_path_factory.mktemp("faulted") / "run")


# -- sections ----------------------------------------------------------------------------------


def test_a_sweep_has_every_section(swept: Page, faulted: Page) -> None:
    for page in (swept, faulted):
        ids = [each.attributes.get("id") for each in page.all("section")]
        assert ids == list(SECTIONS)


def test_the_page_says_what_its_columns_and_words_mean(swept: Page, faulted: Page) -> None:
    for page in (swept, faulted):
        assert "goodput Committed samples / computed samples" in page.words("table")
        words = page.words("reading")
        assert "the twin of a replicate is the same one without faults" in words
        assert all(name in words for name in ("Goodput", "retention", "baseline", "scenario"))


def test_the_first_section_recommends_with_certainty_and_cost(swept: Page) -> None:
    words = swept.words("recommendation")
    assert "Use none" in words
    assert "Certainty. Sure: > 99 %." in words and "2 common seeds of 4 configurations" in words
    assert "Committed samples until the target was reached (samples_to_target) 512" in words
    assert "Measured: digits on 2 peers; target: accuracy at least 0.9; 4 configurations." in words
    assert "within 10 % of the lowest samples_to_target, the one with the lowest" in words


def test_a_study_with_the_line_of_the_page_trains_the_recommended_configuration(
    tmp_path: Path,
) -> None:
    chosen = Configuration(codec="topk", top_k=50, error_feedback=True, local_steps=4)
    logs = [Log(make_spec(trial=0, replicate=seed, configuration=chosen)) for seed in (0, 1)]
    page = page_of(write_run(tmp_path / "run", logs))
    (line,) = (each.text for each in page.all("code") if each.text.startswith("enqueue:"))
    (values,) = yaml.safe_load(line)["enqueue"]
    assert Configuration(**values).completed() == chosen.completed()


def test_every_factor_has_the_same_sign(tmp_path: Path) -> None:
    page = page_of(sweep(tmp_path / "run", baselines=("ddp",)))
    words = " ".join(page.words(name) for name in SECTIONS)
    assert "(× " in page.words("recommendation")  # against the baseline
    assert "2 × x86_64" in page.words("provenance")
    assert not re.search(r"\bx \d|\d x |\[x\]|: x is", words)


def test_the_table_holds_every_row_with_values_to_sort_by(swept: Page) -> None:
    heads = [each for each in swept.all("th") if each.attributes.get("data-numeric")]
    names = [" ".join(each.text.split()).partition(" ")[0] for each in heads]
    assert names[0] == "configuration" and "samples_per_s" in names and "hardware" not in names
    assert [name for name in names if "time_to_target_s" in name] == ["time_to_target_s"]
    numeric = [each for each in swept.all("td") if each.attributes.get("data-value")]
    assert len({each.attributes["data-value"] for each in numeric}) > 20
    assert "4 rows of 8 replicates" in swept.words("table")
    assert "recommended" in swept.words("table")


def test_loss_is_drawn_against_time_samples_and_bytes(swept: Page) -> None:
    drawn = [each.text.strip() for each in swept.all("h4")]
    losses = ["Loss against time", "Loss against samples", "Loss against bytes"]
    assert drawn == [*losses, "accuracy against time"]
    bands = [e for e in swept.all("path") if e.attributes.get("class", "").startswith("band")]
    assert len(bands) == 4 * len(CODECS)


def test_the_target_is_a_line_of_the_chart_of_its_metric(swept: Page) -> None:
    lines = [e for e in swept.all("line") if e.attributes.get("class") == "line target"]
    assert [" ".join(each.text.split()) for each in lines] == ["target: 0.9"]
    assert "Dashed across: the target, accuracy at least 0.9." in swept.words("loss")


def test_the_classes_of_the_wall_time_add_up(swept: Page) -> None:
    words = swept.words("time")
    shares = [float(each) for each in re.findall(r"([\d.]+) %", words)]
    assert sum(shares) == pytest.approx(100 * len(CODECS), abs=2)


def test_the_importance_names_the_axis_that_differs(swept: Page) -> None:
    words = swept.words("importance")
    assert "codec" in words and "give a hint only" in words
    assert "With one value only:" in words and "powersgd_rank" in words


def test_the_objectives_are_the_first_numbers_of_the_table(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    table = page_table(read_run(run, load_results(run)))
    names = [each.column.name for each in table.columns]
    assert names[table.keys : table.keys + 2] == ["samples_to_target", "time_to_target_s"]
    values = [row.cells[table.keys].value for row in table.rows]
    assert values == [str(row["samples_to_target"]) for row in load_results(run).folded]


def test_baselines_have_no_part_in_the_importance(swept: Page, tmp_path: Path) -> None:
    # a baseline has no value of any axis, which is no value of its own
    beside = page_of(sweep(tmp_path / "run", baselines=("single", "ddp")))
    assert beside.words("importance") == swept.words("importance")


def test_the_provenance_has_commands_and_the_study(swept: Page) -> None:
    words = swept.words("provenance")
    assert "git revision abc1234" in words and "rayhive sweep" in words
    assert "--replicate 0 --scenario none" in words and "objectives:" in words


def test_the_faults_of_a_scenario_are_drawn_over_its_throughput(faulted: Page) -> None:
    words = faulted.words("faults")
    assert "story, none, seed 0: completed after 13 s" in words
    assert "kill on peer-1" in words and "verified" in words and "1.30 s" in words
    assert "peer-1.1 starts because of f0" in words
    assert "4.50 s f0 kill on peer-1 fires" in words
    summary = faulted.words("recommendation")
    assert "No recommendation" in summary and "none · scenario story" in summary
    charts = [
        each.attributes["aria-label"] for each in faulted.all("svg") if "role" in each.attributes
    ]
    assert any(label.startswith("Throughput. Committed samples per second") for label in charts)


# -- axes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (-1.0, 1.0, False, [-1, -0.5, 0, 0.5, 1]),
        (0.09, 2.4, True, [0.1, 0.2, 0.5, 1, 2]),
        (1e-7, 1e6, True, [1e-7, 1e-5, 1e-3, 1e-1, 10, 1e3, 1e5]),
        (2.1, 2.9, True, [2.2, 2.4, 2.6, 2.8]),  # no power of ten in it
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, log: bool, ticks: list[float]) -> None:
    assert Scale(low, high, 0.0, 100.0, log).ticks() == pytest.approx(ticks)


def test_a_scale_maps_its_ends_and_clamps_the_rest() -> None:
    for log, middle in ((False, 5.5), (True, 10**0.5)):
        scale = Scale(1.0, 10.0, 50.0, 150.0, log)
        assert [scale(v) for v in (0.0, 1.0, middle, 10.0, 99.0)] == [50, 50, 100, 150, 150]


# -- what is not recorded ----------------------------------------------------------------------


def test_missing_counts_are_not_recorded_and_not_zero(tmp_path: Path) -> None:
    log = Log()
    events = log.events()
    for event in events:
        for name in ("sent_bytes", "averaging_s", "seconds", "update_s"):
            if event["kind"] in ("round", "state_round", "transition"):
                event.pop(name, None)
        if event["kind"] == "transition":
            event["seconds"] = 0.5
    run = write_run(tmp_path / "run", [])
    write_replicate(run, log.spec, events)
    page = page_of(run)
    assert "Loss against bytes: not recorded" in page.words("loss")
    phases = page.words("time")
    assert phases.count("not recorded") >= 3 and " 0.0 ms" not in phases


@pytest.mark.parametrize("fields", [{"code": "other"}, {"scenario": "kill-one"}])
def test_baselines_that_ran_alone_under_a_condition_are_no_choice(
    tmp_path: Path, fields: dict[str, str]
) -> None:
    run = sweep(tmp_path / "run")
    for seed in (0, 1):
        Log(make_spec(trial=None, baseline="single", replicate=seed, **fields)).write(run)
    page = page_of(run)
    assert "Use none" in page.words("recommendation")
    assert "single" in page.words("table")


def test_equal_bytes_leave_the_other_objective_its_certainty(tmp_path: Path) -> None:
    logs = [
        Log(
            make_spec(trial=trial, replicate=n, configuration=Configuration(codec=codec)),
            seconds=tuple((1 + trial / 2) * (1 + n * 0.003) * s for s in (2.0, 0.5, 0.6, 0.7)),
            payload=4000 - 1000 * trial,
        )
        for trial, codec in enumerate(("none", "float16"))
        for n in range(3)
    ]
    objectives = {"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"}
    run = write_run(tmp_path / "run", logs, objectives)
    results = load_results(run)
    assert all(row["pareto_probability"] is not None for row in results.folded)
    assert "Take float16: > 99 % sure" in results_text(results)
    assert "Use float16" in page_of(run).words("recommendation")


def test_a_folder_without_a_study_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log()])
    (run / "sweep.yaml").unlink()
    words = page_of(run)
    assert "the folder has no study with objectives" in words.words("recommendation")
    assert "The study is not recorded." in words.words("provenance")
    alone = page_of(run / "trials" / "0" / "r0-none")
    assert "1 replicate: 1 completed" in " ".join(alone.all("header")[0].text.split())


def test_a_sweep_without_a_finished_replicate_has_a_report(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", [Log(state=None)]))
    assert "No row yet." in page.words("table")
    empty = page_of(write_run(tmp_path / "empty", []))
    assert "No replicate has finished yet." in empty.words("recommendation")


def test_a_lower_bound_is_a_hollow_dot_and_named(tmp_path: Path) -> None:
    logs = [
        Log(
            make_spec(trial=trial, replicate=seed, configuration=Configuration(codec=codec)),
            accuracies=(0.8, 0.96) if seed or not trial else (0.1, 0.2),
        )
        for trial, codec in enumerate(("none", "float16"))
        for seed in (0, 1)
    ]
    page = page_of(write_run(tmp_path / "run", logs))
    drawn = [each.attributes.get("class") for each in page.all("circle")]
    assert drawn.count("dot other bound") == 1
    words = page.words("front")
    assert "A hollow dot is a lower bound" in words
    assert "a lower bound, since not every replicate reached the target" in words


def test_a_missed_target_is_not_reached(tmp_path: Path) -> None:
    other = make_spec(trial=1, configuration=Configuration(codec="float16"))
    page = page_of(write_run(tmp_path / "run", [Log(), Log(other, accuracies=(0.1, 0.2))]))
    assert "missed (0/1)" in page.words("table")
    assert "float16: 0 of 1 replicates reached the target" in page.words("recommendation")


# -- safety and access -------------------------------------------------------------------------


def hostile(run: Path) -> tuple[Path, Results]:
    """Return a sweep in which every text that a user chooses is hostile."""
    results = load_results(sweep(run))
    rows = tuple(
        {**row, "configuration": f"{HOSTILE}{row['codec']}", "workload": HOSTILE, "link": HOSTILE}
        for row in results.rows
    )
    (run / "sweep.yaml").write_text(f"name: {HOSTILE!r}\n", encoding="utf-8")
    (run / "provenance.json").write_text('{"link": "<script>alert(3)</script>"}', encoding="utf-8")
    return run, replace(results, name=HOSTILE, rows=rows)


def test_texts_of_the_user_stay_texts(tmp_path: Path) -> None:
    run, results = hostile(tmp_path / "run")
    page = Page(report_html(run, results))
    assert len(page.all("script")) == 1 and not page.all("img")
    assert page.all("h1")[0].text.strip() == HOSTILE
    assert HOSTILE in page.words("recommendation") and HOSTILE in page.words("table")
    handlers = [name for each in page.elements for name in each.attributes if name.startswith("on")]
    assert handlers == []


def references(page: Page) -> Iterator[str]:
    """Yield everything that a page could load."""
    for element in page.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href"):
            if name in element.attributes:
                yield element.attributes[name]
        if element.tag == "style":
            yield from re.findall(r"url\((.*?)\)|@import\s+(\S+)", element.text)
    yield from ()


def test_the_page_refers_to_nothing_outside_itself(swept: Page, faulted: Page) -> None:
    for page in (swept, faulted):
        found = [each if isinstance(each, str) else "".join(each) for each in references(page)]
        assert found and all(each.startswith("#") for each in found)
        targets = {each.attributes.get("id") for each in page.elements}
        assert {each.removeprefix("#") for each in found if each != "#hatch"} <= targets
        (policy,) = [m for m in page.all("meta") if "http-equiv" in m.attributes]
        assert policy.attributes["content"].startswith("default-src 'none'")


def test_the_structure_is_readable_without_seeing_it(swept: Page, faulted: Page) -> None:
    for page in (swept, faulted):
        levels = [int(each.tag[1]) for each in page.all("h1", "h2", "h3", "h4")]
        assert levels.count(1) == 1 and levels[0] == 1
        assert all(b - a <= 2 for a, b in pairwise(levels))
        assert page.all("html")[0].attributes["lang"] == "en" and len(page.all("main")) == 1
        for picture in page.all("svg"):
            if "aria-hidden" not in picture.attributes:
                assert picture.attributes["role"] == "img" and picture.attributes["aria-label"]
        for head in page.all("th"):
            assert head.attributes.get("scope") in ("row", "col")
        for each in page.all("input"):
            assert "label" in each.inside
        ids = [each.attributes["id"] for each in page.elements if "id" in each.attributes]
        assert len(ids) == len(set(ids))


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_and_lines_stand_out_in_light_and_dark(swept: Page) -> None:
    (style,) = swept.all("style")
    palettes = re.findall(r":root \{(.*?)\}", style.text, re.DOTALL)
    assert len(palettes) == 2
    for palette in palettes:
        light = {n: luminance(c) for n, c in re.findall(r"--(\w+): (#\w{6})", palette)}

        def contrast(one: str, other: str, of: dict[str, float] = light) -> float:
            low, high = sorted((of[one], of[other]))
            return (high + 0.05) / (low + 0.05)

        texts = ("ink", "soft", "link", "good", "c7", "fault")
        weak = [(a, b) for a in texts for b in ("ground", "card") if contrast(a, b) < 4.5]
        lines = [f"c{number}" for number in range(8)]
        weak += [(name, "ground") for name in lines if contrast(name, "ground") < 3]
        assert weak == []


def test_the_file_is_written_in_one_step_and_reloads_only_if_asked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log()])
    write_report(run, tmp_path / "report.html", reload_s=5.0)
    assert 'data-reload="5.0"' in (tmp_path / "report.html").read_text(encoding="utf-8")
    write_report(run, tmp_path / "report.html")
    assert "data-reload=" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["report.html"]
