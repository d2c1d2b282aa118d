"""Report page: all sections as one HTML file without any reference to a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import rayhive
from rayhive.columns import FoldedRow
from rayhive.errors import RayhiveError
from rayhive.files import write_atomically
from rayhive.metrics.logs import last_timeline
from rayhive.report.notice_grid import GridPoint
from rayhive.report.page.conditions import measured_text
from rayhive.report.page.curves import loss_charts
from rayhive.report.page.front import front_charts
from rayhive.report.page.importance import importances
from rayhive.report.page.notice import notice_chart, notices_of
from rayhive.report.page.provenance import provenance
from rayhive.report.page.round_time import PHASES, time_rows
from rayhive.report.page.run_data import RunData, read_run
from rayhive.report.page.table import page_table
from rayhive.report.page.timeline import fault_pictures, timeline_charts
from rayhive.report.page.verdict import fault_summary, robust_choices, rule_text, verdicts
from rayhive.report.page.winner_map import winner_map
from rayhive.report.results import Results, load_results
from rayhive.report.table_notes import count_text
from rayhive.timeline import Timeline

#: Name of the report in a run folder.
REPORT = "report.html"


def write_report(folder: str | Path, path: str | Path, *, reload_s: float | None = None) -> None:
    """Write the report of a run as one HTML file, in one step.

    Args:
        folder: The run folder, or the folder of one replicate.
        path: The file.
        reload_s: Seconds after which the page loads itself again; None for never.

    Raises:
        ConfigError: ``folder`` is no run folder.
        DamagedError: Its study cannot be read.
    """
    text = report_html(Path(folder), load_results(folder), reload_s=reload_s)
    write_atomically(Path(path), text, durable=False, mode=0o644)


def report_html(folder: Path, results: Results, *, reload_s: float | None = None) -> str:
    """Return the report of a run as one HTML page.

    Args:
        folder: The run folder, or the folder of one replicate.
        results: Its results.
        reload_s: Seconds after which the page loads itself again; None for never.
    """
    run = read_run(folder, results)
    pictures, left_out = fault_pictures(run)
    return _page(
        "report.html",
        title=f"{results.name}: report",
        reload_s=reload_s,
        run=run,
        measured=measured_text(run),
        rule=rule_text(results.objectives) if results.objectives else "",
        verdicts=verdicts(run),
        robust=robust_choices(run),
        has_choice=any(len(each.candidates) > 1 for each in run.recommendations),
        faults=fault_summary(run),
        table=page_table(run),
        fronts=front_charts(run),
        curves=loss_charts(run),
        times=time_rows(run),
        phases=PHASES,
        pictures=pictures,
        pictures_left_out=left_out,
        notices_of_run=notices_of(run),
        importances=importances(run),
        map=winner_map(run),
        provenance=provenance(run),
        states=_states(run),
        lacking=_lacking(run.results),
    )


def write_timeline_picture(folder: str | Path, path: str | Path) -> None:
    """Write the picture of a replicate as one HTML file without external resources.

    Raises:
        RayhiveError: The events cannot be read, or the replicate never trained.
    """
    Path(path).write_text(timeline_html(last_timeline(folder)), encoding="utf-8")


def timeline_html(timeline: Timeline) -> str:
    """Return the picture of a replicate as one HTML page.

    Raises:
        RayhiveError: The replicate never trained.
    """
    if timeline.span is None:
        raise RayhiveError("no picture: the replicate never trained")
    picture = timeline_charts(timeline)
    return _page("timeline.html", title=picture.title, reload_s=None, picture=picture)


def notice_html(points: Iterable[GridPoint]) -> str:
    """Return the notice grid as one HTML page: goodput and its interval against the notice."""
    grid = notice_chart(list(points))
    return _page("notice.html", title=grid.chart.title, reload_s=None, grid=grid)


def _states(run: RunData) -> Mapping[str, int]:
    states = [str(row["state"]) for row in run.results.rows]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def _lacking(results: Results) -> str:
    """Return how many replicates the rows of a table lack; empty if none."""
    wanted = results.wanted or 0
    rows = [row for row in results.folded if isinstance(row, FoldedRow)]
    short = [lack for row in rows if (lack := wanted - len(row.replicates.ran)) > 0]
    if not short:
        return ""
    asked, all_rows = count_text(wanted, "replicate"), count_text(len(rows), "row")
    missing = f"{sum(short)} more, in {len(short)} of {all_rows}"
    return f"The study asks for {asked} of each row: it lacks {missing}."


def _page(template: str, **values: Any) -> str:
    """Return a page from its template, with style and script in it."""
    loader = jinja2.PackageLoader("rayhive.report.page")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = (loader.get_source(environment, name)[0] for name in ("style.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return environment.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
        written=now,
        version=rayhive.__version__,
        **values,
    )
