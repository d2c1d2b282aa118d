"""``rayhive sweep``, ``rayhive retry`` and ``rayhive plan``."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.text import Address, File, complain, print_json, print_rows
from rayhive.errors import ConfigError, unknown

if TYPE_CHECKING:
    from rayhive.api import Run
    from rayhive.sweep.dry_run import Plan

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one field, as in budget.trials=8; may be repeated.",
        show_default=False,
    ),
]
Format = Annotated[str, typer.Option(help="Format of the results: table, md, csv, json or latex.")]


def sweep(
    file: File,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder; by default runs/NAME, in a submitted job ~/runs/NAME.",
            show_default=False,
        ),
    ] = None,
    format: Format = "table",
    code: Annotated[
        str,
        typer.Option(
            help="If the workload's code or data changed since the run folder was begun: refuse; "
            "keep-apart, in rows of their own; or accept, as the change is none in behaviour."
        ),
    ] = "refuse",
) -> None:
    """Run a study, or resume it where it was interrupted, and print its results.

    Example: `rayhive sweep experiments/quickstart.yaml --set budget.trials=4`

    Ctrl-C or SIGTERM stops the sweep and leaves no process behind; the same command resumes it.
    Another study needs another name or --out. Of the same study only budget.trials and replicates
    may grow, and timeouts and retries may change.
    """
    from rayhive import api

    check_format(format)
    _report(lambda: api.sweep(file, set=set_ or (), address=address, out=out, code=code), format)


def retry(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The run folder.", show_default=False)
    ],
    set_: Sets = None,
    address: Address = None,
    format: Format = "table",
) -> None:
    """Run again the replicates that were lost in every attempt, then resume the study.

    Example: `rayhive retry runs/quickstart --set timeouts.starting=300`

    Replicates that were lost with their nodes, found no room in time or started too slowly get
    their attempts once more. Failures of a configuration are results, and stay.
    """
    from rayhive import api

    check_format(format)
    _report(lambda: api.retry(folder, set=set_ or (), address=address), format)


def _report(run: Callable[[], Run], format: str) -> None:
    """Run a study and print its results."""
    from rayhive.sweep.signals import Interrupted

    try:
        found = run()
    except Interrupted as stop:
        complain(f"{stop.reason}; finished replicates are kept in {stop.folder}. To resume:")
        complain(f"  {shlex.join(command_of_process())}")
        raise typer.Exit(stop.exit_code) from None
    _print_results(found, format)
    done = found.done
    if done is not None and done.trials and done.failed == done.trials:
        raise typer.Exit(1)


def plan(
    file: File,
    set_: Sets = None,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster that the study is for. It is not contacted, and this machine is "
            "not checked.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Predict the trials, bytes and duration of a study. Starts nothing, writes nothing.

    Example: `rayhive plan experiments/quickstart.yaml`

    Refuses what `sweep` would refuse: a storage that cannot be opened and, without an address,
    faults that this machine cannot commit and GPUs that it lacks.
    """
    from rayhive import api

    if format not in ("table", "json"):
        raise ConfigError(unknown("--format", format, ("table", "json")))
    found = api.plan(file, set=set_ or (), address=address)
    _print_plan(found, format)
    if found.unmet:
        complain("the study cannot run from this machine:")
        raise ConfigError(found.unmet)


def with_default_file(arguments: Sequence[str], file: Path) -> list[str]:
    """Return the arguments of ``sweep`` with ``file`` inserted if they name no study."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return list(arguments)
        if "=" not in argument and argument != "--help":
            next(rest, None)  # the value of the option
    return [str(file), *arguments]


def check_format(format: str) -> None:
    """Refuse an unknown format of results.

    Raises:
        ConfigError: The format is unknown.
    """
    from rayhive.report.formats import FORMATS

    if format not in FORMATS:
        raise ConfigError(unknown("--format", format, FORMATS))


def command_of_process() -> list[str]:
    """Return the command that started this process, as its user would type it."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["rayhive", *sys.argv[1:]]


def _print_results(run: Run, format: str) -> None:
    from rayhive.report.render import results_text

    width = shutil.get_terminal_size((120, 24)).columns
    color = sys.stdout.isatty()
    print(results_text(run.folder, format, console_width=width, color=color, complain=complain))
    if run.done is not None:
        failed = f", {run.done.failed} failed" if run.done.failed else ""
        again = shlex.join(["rayhive", "results", str(run.folder)])
        complain(f"{run.done.trials} trials{failed}; {run.folder} (again: {again})")


def _print_plan(found: Plan, format: str) -> None:
    if format == "json":
        print_json(_plan_rows(found))
        return
    for line in _plan_lines(found):
        print(line)
    print()
    print_rows(
        _plan_rows(found),
        {
            "configuration": "configuration",
            "enqueued": "enqueued",
            "payload_bytes_per_round_predicted": "payload/peer/round [B]>",
            "gradient_compression_ratio": "ratio [x]>",
            "compressed_tensors": "factorised>",
            "exact": "exact",
        },
    )
    if found.left_out:
        print(f"... and {found.left_out} more corners of the space")


def _plan_lines(plan: Plan) -> Iterator[str]:
    from rayhive.sweep.dry_run import describe
    from rayhive.sweep.eta import clock

    config = plan.study.config
    space = "" if plan.space_size is None else f" (the space has {plan.space_size} configurations)"
    yield f"{config.name}: {config.workload.label} ({plan.study.workload.data} data)"
    yield (
        f"  {plan.trials} trials{space} x {len(config.scenarios)} scenarios x "
        f"{config.replicates} replicates = {plan.replicates} replicates of "
        f"{config.swarm.peers} peers"
    )
    if plan.study.twin_added:
        yield "  the scenario none was added as the twin of the faulted scenarios"
    for scenario in plan.scenarios:
        yield f"  {scenario.name}: {describe(scenario)}"
    rounds = "" if plan.rounds is None else f"{plan.rounds} rounds, "
    yield (
        f"  each at most {rounds}{clock(config.budget.seconds_per_replicate)} of training; "
        f"all at most {clock(plan.longest_s)}, plus some seconds for each start"
    )
    yield f"  gradients of one peer, uncompressed: {plan.dense_bytes:,} B"


def _plan_rows(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "configuration": row.configuration.label,
            **row.configuration.model_dump(mode="json"),
            "enqueued": row.enqueued,
            "payload_bytes_per_round_predicted": row.bytes_per_round,
            "gradient_compression_ratio": row.ratio,
            "compressed_tensors": row.compressed,
            "exact": row.exact,
        }
        for row in plan.configurations
    ]
