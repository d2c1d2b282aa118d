"""``rayhive sweep``, ``retry``, ``plan``, ``results`` and ``replay``."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.options import (
    Address,
    ListFormat,
    Parallel,
    ResultsFormat,
    RunFolder,
    RunPlace,
    Sets,
    StudyFile,
    local_path,
    run_folder,
)
from rayhive.cli.output import complain, print_json, print_rows
from rayhive.cli.recorded import print_beside
from rayhive.cli.scenarios import print_stories
from rayhive.errors import ConfigError, unknown
from rayhive.sweep.signals import Interrupted

if TYPE_CHECKING:
    from rayhive.api import Run


def sweep(
    file: StudyFile,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The run folder, or its URL, as s3://BUCKET/PATH; by default runs/NAME, in a "
            "submitted job ~/runs/NAME.",
        ),
    ] = None,
    format: ResultsFormat = "table",
    code: Annotated[
        str,
        typer.Option(
            help="If the workload's code or data changed since the run folder was begun: refuse; "
            "keep-apart, to give the new replicates rows of their own; or accept, if the change "
            "does not affect the results."
        ),
    ] = "refuse",
    parallel: Parallel = "1",
) -> None:
    """Run a study, or resume it where it was interrupted, and print its results.

    Example: `rayhive sweep experiments/quickstart.yaml --set replicates=3`

    Ctrl-C or SIGTERM stops the sweep and leaves no process behind; the same command resumes it.
    Another study needs another name or --out. The same study may get more trials, replicates,
    scenarios and baselines, and other timeouts and retries.
    """
    from rayhive import api

    _run(
        lambda: api.sweep(file, set=set_, address=address, out=out, code=code, parallel=parallel),
        format,
    )


def retry(
    folder: RunPlace,
    set_: Sets = None,
    address: Address = None,
    format: ResultsFormat = "table",
    parallel: Parallel = "1",
) -> None:
    """Run again the replicates that were lost in every attempt, then resume the study.

    Example: `rayhive retry runs/quickstart --set timeouts.starting=300`

    Replicates that were lost with their nodes, found no room in time or started too slowly get
    their attempts once more. Failures of a configuration are results, and stay.
    """
    from rayhive import api

    _run(lambda: api.retry(folder, set=set_, address=address, parallel=parallel), format)


def _run(run: Callable[[], Run], format: str) -> None:
    """Run a study and print its results."""
    from rayhive.report.render import FORMATS, results_text

    if format not in FORMATS:
        raise ConfigError(unknown("--format", format, FORMATS))
    try:
        found = run()
    except Interrupted as stop:
        complain(f"{stop.reason}; {stop.kept} in {stop.folder}. To resume:")
        complain(f"  {shlex.join(command_of_process())}")
        raise typer.Exit(stop.exit_code) from None
    print(results_text(found.results, format, (), None, _width(), sys.stdout.isatty(), complain))
    if found.done is not None:
        failed = f", {found.done.failed} failed" if found.done.failed else ""
        again = shlex.join(["rayhive", "results", str(found.folder)])
        page = shlex.join(["rayhive", "report", str(found.folder)])
        complain(
            f"{found.done.trials} trials{failed}; {found.folder} (again: {again}; page: {page})"
        )
        if found.done.trials and found.done.failed == found.done.trials:
            raise typer.Exit(1)


def command_of_process() -> list[str]:
    """Return the command that started this process, as its user would type it."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["rayhive", *sys.argv[1:]]


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def plan(
    file: StudyFile,
    set_: Sets = None,
    format: ListFormat = "table",
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster that the study is for. It is not contacted, and this machine is "
            "not checked."
        ),
    ] = None,
    difference: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Print instead how many replicates show a difference of two rows, as in 10%.",
        ),
    ] = None,
    spread: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Standard deviation between replicates of one row, for --difference.",
        ),
    ] = None,
    past: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Run folder to take the spread from; by default that of the study.",
            parser=run_folder,
        ),
    ] = None,
) -> None:
    """Predict the trials, bytes and duration of a study. Starts nothing, writes nothing.

    Examples: `rayhive plan experiments/quickstart.yaml`, `rayhive plan FILE --difference 10%
    --spread 5%`

    Refuses what `sweep` would refuse: without an address also faults that this machine cannot
    inject, and GPUs that it lacks. The storage is not opened.
    """
    from rayhive import api
    from rayhive.cli.plan_text import replicates_lines, study_plan_lines, study_plan_rows

    found = api.plan(file, set=set_, address=address)
    if difference is not None or spread is not None or past is not None:
        needs = api.replicates_needed(found, difference or "10%", spread=spread, past=past)
        if format == "json":
            print_json([asdict(each) for each in needs])
        else:
            print("\n".join(replicates_lines(found, needs)))
        return
    rows = study_plan_rows(found)
    if format == "json":
        print_json(rows)
    else:
        print("\n".join(study_plan_lines(found)), end="\n\n")
        print_rows(
            rows,
            {
                "configuration": "configuration",
                "enqueued": "enqueued",
                "payload_bytes_per_round_predicted": "gradients/peer/round [B]>",
                "state_bytes_per_round_predicted": "parameters [B]>",
                "all_bytes_per_round_predicted": "all [B]>",
                "all_bytes_per_sample_predicted": "all [B/sample]>",
                "link_s_per_round": "link s/round>",
                "gradient_compression_ratio": "ratio [×]>",
                "compressed_tensors": "factorised>",
                "exact": "exact",
            },
        )
        if found.left_out:
            print(f"... and {found.left_out} more corners of the space")
    if found.unmet:
        complain("the study cannot run from this machine:")
        raise ConfigError(found.unmet)


def results(
    folder: RunFolder,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Make one row of all replicates that agree in this column: codec, "
            "powersgd_rank, delay, …; may be repeated."
        ),
    ] = None,
    format: ResultsFormat = "table",
    sort: Annotated[
        str | None,
        typer.Option(
            help="Column to sort by; with - in front, descending (--sort=-samples_per_s)."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Columns to show; by default the objectives, with how sure they are.",
        ),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show every column that has a value.")
    ] = False,
    versus: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIGURATION",
            help="Show the differences to this row, paired by seed; `first` for the first row.",
        ),
    ] = None,
) -> None:
    """Print the results table of a run: one row per configuration, computed from its events.

    Examples: `rayhive results runs/quickstart`, `rayhive results runs/quickstart --by codec
    --format md`, `rayhive results runs/quickstart --versus none`
    """
    from rayhive.report.render import results_text

    text = results_text(
        folder,
        format,
        by or (),
        sort,
        _width(),
        sys.stdout.isatty(),
        complain,
        [name.strip() for name in columns.split(",") if name.strip()] if columns else (),
        wide,
        versus,
    )
    print(text)


def replay(
    folder: RunFolder,
    trial: Annotated[
        str, typer.Argument(metavar="TRIAL", help="Number of the trial, or name of the baseline.")
    ],
    replicate: Annotated[int, typer.Option(help="Number of the replicate.", min=0)] = 0,
    scenario: Annotated[
        str | None,
        typer.Option(help="Its scenario; by default the only one of the trial that has faults."),
    ] = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the new replicate; by default runs/replay-TIME.", parser=local_path
        ),
    ] = None,
) -> None:
    """Run a recorded replicate again, with the recorded spec and fault plan.

    Example: `rayhive replay runs/kill-one 0`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    from rayhive import api
    from rayhive.sweep.replay import replicate_folder

    found = api.replay(
        folder, trial, replicate=replicate, scenario=scenario, address=address, out=out
    )
    wrong = print_stories(found, always=True)
    print_beside(replicate_folder(folder, trial, replicate, scenario), found.folder)
    print(f"all columns: {shlex.join(['rayhive', 'results', str(found.folder)])}")
    raise typer.Exit(int(wrong))
