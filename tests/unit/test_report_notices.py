"""The notice grid: goodput against the length of the notice, as text and as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import RayhiveError
from rayhive.report.notice_grid import notice_grid, notice_lines
from rayhive.report.page.write import notice_html
from rayhive.spec import Configuration
from tests.fixtures.faulted import ALL, REST, Story, planned
from tests.fixtures.html import Page
from tests.fixtures.logs import Log, write_run


def preempted(notice: int, replicate: int, lost: int, **fields: Any) -> Story:
    story = Story(
        [planned(kind="preempt")],
        scenario=f"preempt-notice-{notice}",
        replicate=replicate,
        **fields,
    )
    story.rounds(1.0, 2.0, 3.0, peers=ALL)
    story.fire(3.2, 0, ["peer-1"])
    story.lose(3.5, "peer-1", computed=lost)
    story.rounds(4.5, 5.5, 6.5, 7.5, peers=REST)
    story.finish(7.5, REST)
    story.end(8.0)
    return story


def test_the_grid_is_goodput_against_notice(tmp_path: Path) -> None:
    stories = [
        preempted(notice, replicate, lost)
        for notice, losses in ((0, (60, 50)), (5, (30, 20)), (15, (0, 0)))
        for replicate, lost in enumerate(losses)
    ]
    points = notice_grid(write_run(tmp_path / "run", stories))  # type: ignore[arg-type]
    assert [point.notice_s for point in points] == [0.0, 5.0, 15.0]
    committed = 9 * 64 + 8 * 64
    first = (committed / (committed + 60) + committed / (committed + 50)) / 2
    assert points[0].goodput == pytest.approx(first)
    assert points[0].low is not None and points[0].low < first < (points[0].high or 0)
    assert [point.samples_lost for point in points] == [110, 50, 0]
    lines = notice_lines(points)
    assert len(lines) == 5
    assert lines[-1] == "| none | 15 | 2 | 1 | - | 0 |"
    page = Page(notice_html(points))
    drawn = [each.attributes["class"] for each in page.all("circle", "line")]
    assert drawn.count("dot c0") == 3 and drawn.count("line whisker c0") == 2
    assert [each.text.strip() for each in page.all("th")][-3:] == ["none"] * 3


def test_a_run_without_notice_scenarios_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RayhiveError, match="preempt-notice"):
        notice_grid(write_run(tmp_path / "run", [Log()]))


def lines_of(run: Path) -> dict[str, list[float]]:
    """Return the lengths of notice that each line of the chart joins, by its name."""
    points = notice_grid(run)
    page = Page(notice_html(points))
    legend = [
        each.text.strip() for each in page.all("span") if each.attributes.get("class") == "key"
    ]
    corners = [d.count("L") + 1 for each in page.all("path") if "L" in (d := each.attributes["d"])]
    lines = {name: [p.notice_s for p in points if p.configuration == name] for name in legend}
    assert [len(line) for line in lines.values()] == corners
    return lines


def test_rows_of_other_code_have_lines_of_their_own(tmp_path: Path) -> None:
    stories = [
        preempted(notice, replicate, lost=10, code=code, trial=trial)
        for trial, code in enumerate(("old", "new"))
        for notice in (0, 5)
        for replicate in (0, 1)
    ]
    run = write_run(tmp_path / "run", stories)  # type: ignore[arg-type]
    expected = {"none, code new": [0.0, 5.0], "none, code old": [0.0, 5.0]}
    assert lines_of(run) == expected


def test_configurations_whose_names_are_equal_have_lines_of_their_own(tmp_path: Path) -> None:
    stories = [
        preempted(
            notice,
            0,
            lost=10,
            trial=trial,
            configuration=Configuration(local_steps=4, outer_lr=rate, outer_momentum=0.0),
        )
        for trial, rate in enumerate((0.70000001, 0.70000002))
        for notice in (0, 5)
    ]
    (name,) = {story.spec.label for story in stories}
    run = write_run(tmp_path / "run", stories)  # type: ignore[arg-type]
    assert lines_of(run) == {f"{name} (1)": [0.0, 5.0], f"{name} (2)": [0.0, 5.0]}


def test_a_point_with_failed_replicates_is_marked(tmp_path: Path) -> None:
    stories = [preempted(notice, n, lost=10) for notice in (0, 5) for n in range(3)]
    stories[-1].events[-1]["state"] = "failed"
    points = notice_grid(write_run(tmp_path / "run", stories))  # type: ignore[arg-type]
    assert [(point.n, point.ran) for point in points] == [(3, 3), (2, 3)]
    whole, part = notice_lines(points)[2:]
    assert "(2/3)" in part and "/3)" not in whole
    html = notice_html(points)
    dots = [each.attributes["class"] for each in Page(html).all("circle")]
    assert dots == ["dot c0", "dot part line c0"]
    assert "(2/3)" in html and "Hollow points" in html
    without = notice_html(points[:1])
    assert "Hollow points" not in without
