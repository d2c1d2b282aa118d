"""Results tables in every output format."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import partial
from pathlib import Path

import pytest

from rayhive.errors import ConfigError
from rayhive.report.render import results_text
from rayhive.report.results import configuration_types
from rayhive.spec import Configuration, SwarmConfig
from tests.fixtures.faulted import ALL, REST, Story, planned
from tests.fixtures.logs import Log, make_spec, write_run

wide_text = partial(results_text, wide=True)
CONFIGURATIONS = (
    Configuration(),
    Configuration(codec="float16"),
    Configuration(codec="size_adaptive", threshold=65537),
    Configuration(codec="none", powersgd_rank=4, min_compression_ratio=0.5, delay="gradients"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four configurations of two replicates that differ in speed and payload.

    Trial 1 reaches its target once, trial 2 was once ended by the time limit; besides, one
    configuration diverged and one is still running.
    """
    logs = []
    for trial, configuration in enumerate(CONFIGURATIONS):
        for replicate in (0, 1):
            log = Log(
                spec=make_spec(trial=trial, replicate=replicate, configuration=configuration),
                seconds=(2.0, 0.5 + trial + 0.01 * replicate, 0.6, 0.7),
                losses=(1.0, 0.5 + 0.01 * replicate),
                payload=4000 // 2**trial,
            )
            if (trial, replicate) == (1, 1):
                log.accuracies = (0.1, 0.2)
            if (trial, replicate) == (2, 0):
                log.state = "timed_out"
            logs.append(log)
    diverged = Log(spec=make_spec(trial=4, configuration=Configuration(codec="uniform8")))
    diverged.state = "diverged"
    running = Log(spec=make_spec(trial=5, configuration=Configuration(codec="quantile8")))
    running.state = None
    return write_run(tmp_path / "run", [*logs, diverged, running])


def test_json_is_a_list_of_objects_with_the_column_names(run: Path) -> None:
    rows = json.loads(wide_text(run, "json"))
    assert [row["configuration"] for row in rows] == [
        "none",
        "float16",
        "size_adaptive(65537)",
        "none rank4(≥0.5) delay-gradients",
        "uniform8",
    ]
    assert all(list(row) == list(configuration_types(rows)) for row in rows)
    assert {"metric.accuracy", "metric.accuracy_low", "metric.accuracy_high"} <= set(rows[0])
    first = rows[0]
    assert first["payload_bytes_per_round"] == first["payload_bytes_per_round_predicted"] == 4000
    assert first["final_loss"] == pytest.approx(0.515, rel=1e-15)
    assert first["threshold"] is None and rows[2]["threshold"] == 65537
    assert first["faults_planned"] is None  # empty, not zero
    assert first["pareto"] is True
    assert rows[1]["reached"] == 1
    assert (rows[4]["n"], rows[4]["n_failed"], rows[4]["final_loss"]) == (0, 1, None)


def test_csv_holds_the_same_as_json(run: Path) -> None:
    read = list(csv.DictReader(io.StringIO(wide_text(run, "csv"))))
    rows = json.loads(wide_text(run, "json"))
    assert len(read) == len(rows)
    for line, row in zip(read, rows, strict=True):
        assert line == {name: "" if v is None else str(v) for name, v in row.items()}


@pytest.mark.parametrize("width", [40, 80, 100, 200, 500])
def test_no_number_is_cut_whatever_the_width(run: Path, width: int) -> None:
    def tokens(text: str) -> set[str]:
        return set(re.findall(r"[\d.,]+(?: ± [\d.,]+)?", text))

    wide, narrow = wide_text(run, console_width=1000), wide_text(run, console_width=width)
    assert tokens(narrow) == tokens(wide)
    assert "…" not in narrow


@pytest.mark.parametrize("width", [80, 100, 200])
def test_lines_fit_the_width(run: Path, width: int) -> None:
    assert max(map(len, wide_text(run, console_width=width).splitlines())) <= width


def test_the_table_has_groups_units_and_marks(run: Path) -> None:
    text = wide_text(run, console_width=1000)
    title, _, advice, _, groups, *_ = text.splitlines()
    # equal bytes are no coincidence, and the first objective decides
    assert advice.startswith("Take none rank4(≥0.5) delay-gradients: > 99 % sure")
    assert title == "study: 5 rows of 9 replicates"
    assert groups.split() == [
        "configuration",
        "replication",
        "convergence",
        "throughput",
        "communication",
    ]
    assert {"[s]", "[1/s]", "[B]", "[×]", "[elements]"} <= set(text.split())
    assert "★ none" in text
    assert "★ float16" not in text  # its time is known of one replicate only
    assert re.search(r"≥ 5\.\d\d \[[\d., ]+\] \(1/2\)", text)
    assert "2 (1†)" in text
    assert "\x1b" not in text


def test_the_notes_explain_signs_and_provenance(run: Path) -> None:
    notes = wide_text(run, console_width=1000).split("\n\n")[-1]
    assert "Pareto front of payload_bytes_per_sample (minimize), time_to_target_s (min" in notes
    assert "not counted: 1 unfinished." in notes
    empty = next(line for line in notes.splitlines() if line.startswith("Empty in every row"))
    assert "link" in empty and "faults_planned" in empty and "wire_bytes_per_round" in empty
    assert "threshold" not in empty and "rounds_partial" not in empty
    assert "git_revision: abc1234" in notes
    assert "started: 2025-06-15T15:06:40Z" in notes


def test_only_values_that_separate_from_every_other_row_are_marked(run: Path) -> None:
    lines = wide_text(run, "md").splitlines()
    header = [cell.strip() for cell in lines[4].strip("|").split("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[6:11]]

    def column(name: str) -> list[str]:
        index = next(i for i, cell in enumerate(header) if f"`{name}`" in cell)
        return [row[index] for row in rows]

    payload = column("payload_bytes_per_round")
    assert payload == ["4,000", "2,000", "1,000", "**500**", "-"]
    assert not [cell for cell in column("final_loss") if "**" in cell]  # all alike
    # the first row is the fastest, but both replicates measured the same to the bit: that is no
    # interval without width, and nothing is known to separate from it
    speeds = column("samples_per_s")
    assert "[" not in speeds[0] and all("[" in cell for cell in speeds[1:4])
    assert not [cell for cell in speeds if "**" in cell]
    predicted = column("payload_bytes_per_round_predicted")
    assert not [cell for cell in predicted if "**" in cell]  # no better or worse


def test_without_intervals_nothing_is_marked(tmp_path: Path) -> None:
    logs = [
        Log(spec=make_spec(trial=trial, configuration=configuration), payload=4000 // (trial + 1))
        for trial, configuration in enumerate(CONFIGURATIONS)
    ]
    run = write_run(tmp_path / "run", logs)
    assert "**4" not in wide_text(run, "md")
    assert " *" not in wide_text(run)


def test_a_terminal_gets_bold(run: Path) -> None:
    text = wide_text(run, console_width=1000, color=True)
    assert re.search(r"\x1b\[1m *500\x1b\[0m", text)
    assert re.search(r" 500 \*", wide_text(run, console_width=1000))


def test_latex_is_escaped_and_whole(run: Path) -> None:
    text = wide_text(run, "latex")
    body = text[text.index(r"\begin{tabular}") : text.index(r"\end{tabular}")]
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr)"):
        assert rule in body
    assert r"size\_adaptive(65537)" in body
    assert r"$\pm$" in body and r"$\geq$" in body and r"$\star$" in body
    assert r"\textbf{500}" in body
    columns = len(body.splitlines()[0].removeprefix(r"\begin{tabular}").strip("{}"))
    for line in body.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line:
            assert line.count(" & ") + 1 == columns
    assert not re.search(r"(?<!\\)[_%#]", text.partition("\n")[2].partition("\n")[2])
    assert re.fullmatch(r"[\x00-\x7f]*", text)


def test_sorting(run: Path) -> None:
    def order(sort: str) -> list[str]:
        return [row["codec"] for row in json.loads(wide_text(run, "json", sort=sort))]

    ascending = order("payload_bytes_per_round")
    assert ascending == ["none", "size_adaptive", "float16", "none", "uniform8"]
    # empty stays last
    assert order("-payload_bytes_per_round") == [*reversed(ascending[:4]), "uniform8"]
    assert order("configuration")[0] == "float16"
    assert order("-pareto")[:3] == ["none", "size_adaptive", "none"]


def test_lower_bounds_are_sorted_after_known_times(tmp_path: Path) -> None:
    quick, slow = losses(0, 0.5, 0.5, 0.5), losses(1, 0.5, 0.5)
    for log in quick[1:]:
        log.state = "diverged"
    for log in slow:
        log.accuracies = (0.1, 0.96)
    quick[0].accuracies = (0.95, 0.96)  # one of three, at the first evaluation
    run = write_run(tmp_path / "run", [*quick, *slow])
    for sort in ("time_to_target_s", "-time_to_target_s"):
        rows = json.loads(wide_text(run, "json", sort=sort))
        assert [row["codec"] for row in rows] == ["float16", "none"]
        assert rows[1]["time_to_target_s"] < rows[0]["time_to_target_s"]


def test_by_makes_one_row_per_value(run: Path) -> None:
    rows = json.loads(wide_text(run, "json", by=["codec"]))
    assert {row["codec"]: row["n"] for row in rows} == {
        "none": 4,
        "float16": 2,
        "size_adaptive": 2,
        "uniform8": 0,
    }
    text = wide_text(run, by=["codec", "delay"], console_width=1000)
    header = next(line.split() for line in text.splitlines() if line.startswith("codec"))
    assert header[:3] == ["codec", "delay", "scenario"]
    assert "threshold" not in header and "configuration" not in header
    assert text.startswith("study: 5 rows of 9 replicates")


@pytest.mark.parametrize("versus", [None, "first"])
def test_chosen_columns_come_with_all_that_identifies_a_row(
    tmp_path: Path, versus: str | None
) -> None:
    logs = [
        Log(spec=make_spec(trial=trial, configuration=Configuration(codec=codec), code=code))
        for trial, (codec, code) in enumerate((c, v) for v in "ab" for c in ("none", "uniform8"))
    ]
    run = write_run(tmp_path / "run", logs)
    rows = json.loads(
        results_text(run, "json", by=["codec"], columns=["final_loss"], versus=versus)
    )
    expected = {("uniform8", "a"), ("uniform8", "b")}
    expected |= {("none", "a"), ("none", "b")} if versus is None else set()
    assert {(row["codec"], row["code"]) for row in rows} == expected
    (head, *_) = results_text(run, "csv", columns=["final_loss"], versus=versus).splitlines()
    assert {"configuration", "code"} <= set(head.split(","))


def test_a_metric_that_no_replicate_was_evaluated_for_is_empty(tmp_path: Path) -> None:
    failed = Log(spec=make_spec(), losses=(), state="failed")
    run = write_run(tmp_path / "run", [failed], {"metric.accuracy": "maximize"})
    assert "n_failed" in results_text(run)
    (row,) = json.loads(results_text(run, "json"))
    assert row["metric.accuracy"] is None and row["n_failed"] == 1
    other = make_spec(trial=1, configuration=Configuration(codec="float16"))
    Log(spec=other, losses=(), state="failed").write(run)
    assert "none" in results_text(run, versus="float16")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        wide_text(tmp_path / "no", "jsn", by=["codex", "final_loss"], sort="-sample_per_s")
    told = {problem.value: problem.nearest for problem in caught.value.problems}
    assert told["jsn"] == "json"
    assert told["codex"] == "codec"
    assert "final_loss" in told
    assert told["sample_per_s"] == "samples_per_s"
    assert str(tmp_path / "no") in told


@pytest.mark.parametrize("format", ["table", "md", "latex", "csv", "json"])
def test_a_run_without_finished_replicates_is_no_error(tmp_path: Path, format: str) -> None:
    run = write_run(tmp_path / "run", [Log(state=None)])
    text = wide_text(run, format)
    if format == "json":
        assert json.loads(text) == []
    elif format == "csv":
        assert text.count("\n") == 1
    else:
        assert "No replicate has finished." in text
        assert "1 unfinished" in text


def test_peers_tell_rows_apart_and_are_repeated_in_every_block(tmp_path: Path) -> None:
    logs = [
        Log(spec=make_spec(trial=n, swarm=SwarmConfig(peers=n, target_batch_size=128)))
        for n in (2, 3)
    ]
    text = wide_text(write_run(tmp_path / "run", logs), console_width=80)
    blocks = [block for block in text.split("\n\n") if "─" in block]
    assert len(blocks) > 2
    for block in blocks:
        assert block.splitlines()[-2].split()[:3] == ["★", "none", "2"], block
    assert "5,333" in text


def test_incomplete_rounds_and_wrong_predictions_have_notes(tmp_path: Path) -> None:
    logs = [
        Log(rounds={(2, 0): {"outcome": "partial", "fraction": 0.5}}),
        Log(spec=make_spec(replicate=1), rounds={(3, 1): {"sent_bytes": 1}}),
    ]
    text = wide_text(write_run(tmp_path / "run", logs), console_width=1000)
    assert "In 1 row not every round was averaged by all peers" in text
    assert "In 1 row the payload differs from the exact prediction." in text


def losses(trial: int, *values: float, **fields: object) -> list[Log]:
    """Return replicates of one configuration that end at these losses."""
    spec = {"trial": trial, "configuration": CONFIGURATIONS[trial]}
    return [
        Log(spec=make_spec(replicate=number, **spec), losses=(1.0, value), **fields)  # type: ignore[arg-type]
        for number, value in enumerate(values)
    ]


def test_rows_with_failed_replicates_are_not_marked(tmp_path: Path) -> None:
    """Of five replicates of float16 four diverge, so its low loss is that of a single survivor."""
    good, bad = losses(0, 0.50, 0.51, 0.49), losses(1, 0.10, 0.11, 0.09, 0.5, 0.5)
    objectives = {"final_loss": "minimize"}
    text = wide_text(write_run(tmp_path / "a", [*good, *bad[:3]], objectives), "md")
    assert "**0.110 ± 0.025**" in text and "★ float16" in text and "★ none" not in text
    for log in bad[3:]:
        log.state = "diverged"
    text = wide_text(write_run(tmp_path / "b", [*good, *bad], objectives), "md")
    assert "**0.110" not in text and "★ float16" not in text and "★ none" in text
    assert (
        "Rows with failed replicates (n\\_failed) show the values of the rest, without marks."
        in text
    )


@pytest.mark.parametrize("state", ["diverged", "completed"])
def test_a_failed_replicate_is_not_better_than_a_missed_target(tmp_path: Path, state: str) -> None:
    logs = [*losses(0, 0.5, 0.5, 0.5, 0.5, 0.5), *losses(1, 0.5, 0.5)]
    for log in logs[1:5]:
        log.state, log.accuracies = state, (0.1, 0.2)
    text = wide_text(write_run(tmp_path / "run", logs), console_width=1000)
    assert "★ none" not in text and "★ float16" in text
    cut = r"4\.100" if state == "diverged" else r"4\.\d\d \[[\d., ]+\]"
    assert re.search(rf"≥ {cut} \(1/5\)", text)
    assert " 1/5 " in text and " 2/2 " in text


def storm(number: int, healed: bool, back: float = 5.5, end: float = 44.5) -> Story:
    """Peer 1 of three is killed; the other peers go on at ``back``, or not until ``end`` [s]."""
    story = Story([planned()], replicate=number, seed=number)
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.lose(4.6, "peer-1")
    if healed:
        story.rounds(*(back + n for n in range(4)), peers=REST)
    story.finish(end, REST)
    story.end(end + 0.5)
    return story


@pytest.mark.parametrize("format", ["table", "md", "latex", "json", "csv"])
def test_a_percentile_of_censored_times_is_printed_as_a_bound(tmp_path: Path, format: str) -> None:
    """Nine of ten recoveries are censored; the median must not be that of the tenth."""
    stories = [storm(number, healed=number == 0) for number in range(10)]
    run = write_run(tmp_path / "run", stories)  # type: ignore[arg-type]
    text = wide_text(run, format, console_width=1000)
    if format in ("json", "csv"):
        rows = json.loads(text) if format == "json" else list(csv.DictReader(io.StringIO(text)))
        assert rows[0]["recover_p50_s"] in (None, "")
        assert re.fullmatch(r"0\.9\d*( >40\.0\d*){9}", rows[0]["recover_s"])
    else:
        sign = "$>$" if format == "latex" else ">"
        assert f"{sign} 40 (9 of 10 censored)" in text
        assert "0.9000" not in text
        assert "c of m censored): the percentile of m times, of which c had not ended" in text


def test_a_percentile_with_two_finite_bounds_is_printed_as_both(tmp_path: Path) -> None:
    """Two of ten recoveries are censored after a time in which half of the others had ended."""
    stories = [storm(number, True, back=5.5 + number / 10) for number in range(8)]
    stories += [storm(number, False, end=5.7) for number in (8, 9)]
    text = wide_text(write_run(tmp_path / "run", stories), "table", console_width=1000)  # type: ignore[arg-type]
    assert "1.200 to 1.350 (2 of 10 censored)" in text, text


def test_a_percentile_independent_of_censoring_is_a_number(tmp_path: Path) -> None:
    stories = [storm(number, healed=number > 0) for number in range(10)]
    text = wide_text(write_run(tmp_path / "run", stories), "json")  # type: ignore[arg-type]
    (row,) = json.loads(text)
    assert row["recover_p50_s"] == pytest.approx(0.9, abs=1e-5)
    assert row["recover_p95_s"] is None


def test_a_loss_with_diverged_replicates_shows_the_number_of_survivors(tmp_path: Path) -> None:
    logs = [Log(spec=make_spec(replicate=number)) for number in range(3)]
    run = write_run(tmp_path / "whole", logs)
    assert "final_loss x (k/n)" not in wide_text(run)
    logs[1].state = "diverged"
    text = wide_text(write_run(tmp_path / "run", logs))
    assert "(2/3)" in text and "final_loss x (k/n): mean over the k of n" in text
