"""``rayhive sweep`` and ``rayhive plan``."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.text import Address, File, complain, print_json, print_rows
from rayhive.errors import ConfigError, Problem, unknown

if TYPE_CHECKING:
    from rayhive.sweep.driver import Done, Progress
    from rayhive.sweep.dry_run import Plan
    from rayhive.sweep.study import Study

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one field, as in budget.trials=8; may be repeated.",
        show_default=False,
    ),
]


def sweep(
    file: File,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder; by default runs/NAME, in a submitted job that of the home.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(help="How the results are printed: table, md, csv, json or latex.")
    ] = "table",
    code: Annotated[
        str,
        typer.Option(
            help="If the workload's code or data changed since the run folder was begun: refuse; "
            "keep-apart, in rows of their own; or accept, as it does the same."
        ),
    ] = "refuse",
) -> None:
    """Run a study, or go on with it where it was interrupted, and print its results.

    Example: `rayhive sweep experiments/quickstart.yaml --set budget.trials=4`

    Ctrl-C or SIGTERM stops what runs and leaves nothing behind; the same command goes on. Another
    study needs another name or --out; only budget.trials and replicates may grow, and
    timeouts and retries change.
    """
    from rayhive.sweep.study import load_study
    from rayhive.sweep.sweep import default_folder

    check_format(format)
    study = load_study(file, set_ or ())
    folder = out if out is not None else default_folder(study)
    _run(study, folder, address, format, code)


def retry(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The run folder.", show_default=False)
    ],
    set_: Sets = None,
    address: Address = None,
    format: Annotated[
        str, typer.Option(help="How the results are printed: table, md, csv, json or latex.")
    ] = "table",
) -> None:
    """Run again what the infrastructure lost in every attempt, and go on with the study.

    Example: `rayhive retry runs/quickstart --set timeouts.starting=300`

    Replicates that were lost with their nodes, found no room in time or started too slowly get
    their attempts once more. Failures of a configuration are results, and stay.
    """
    from rayhive.sweep.run_folder import SWEEP
    from rayhive.sweep.study import load_study

    check_format(format)
    if not (folder / SWEEP).is_file():
        raise ConfigError(Problem("DIR", str(folder), f"a run folder, which has a {SWEEP}"))
    study = load_study(folder / SWEEP, set_ or ())
    _run(study, folder, address, format, again=True)


def _run(
    study: Study,
    folder: Path,
    address: str | None,
    format: str,
    code: str = "refuse",
    again: bool = False,
) -> None:
    """Run a study and print its results."""
    from rayhive.cluster.address import in_job
    from rayhive.sweep.code_fingerprint import CHOICES
    from rayhive.sweep.signals import Interrupted, Interruption
    from rayhive.sweep.sweep import preflight, run_sweep

    if code not in CHOICES:
        raise ConfigError(unknown("--code", code, CHOICES))
    preflight(study, folder, address, code=code)
    if in_job():
        complain(f"this run is kept in {folder.absolute()} on {socket.gethostname()}")
    try:
        with Interruption() as interruption, _progress(study) as progress:
            done = run_sweep(study, folder, progress, interruption, address, code=code, again=again)
    except Interrupted as stop:
        _write_tables(folder)
        complain(f"{stop.reason}; what is finished is kept in {folder}. To go on:")
        complain(f"  {shlex.join(_command())}")
        raise typer.Exit(stop.exit_code) from None
    _write_tables(folder)
    _print_results(folder, format)
    _print_end(done, folder)
    if done.trials and done.failed == done.trials:
        raise typer.Exit(1)


def plan(
    file: File,
    set_: Sets = None,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster that the study is for: this machine is not checked then, and "
            "nothing is asked of the cluster.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what a study would run: trials, bytes and time. Starts nothing, writes nothing.

    Example: `rayhive plan experiments/quickstart.yaml`

    What `sweep` would refuse is refused here too: the storage, and without an address the faults
    that this machine can't commit and the GPUs that it does not have.
    """
    from rayhive.sweep.dry_run import make_plan
    from rayhive.sweep.study import load_study
    from rayhive.sweep.sweep import check_machine

    if format not in ("table", "json"):
        raise ConfigError(unknown("--format", format, ("table", "json")))
    study = load_study(file, set_ or ())
    found = make_plan(study)
    _print_plan(found, format)
    refused = list(check_machine(study, address))
    if refused:
        complain("it can't be run from this machine:")
        raise ConfigError(refused)


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


def with_default_file(arguments: Sequence[str], file: Path) -> list[str]:
    """Return the arguments of ``sweep`` with ``file`` put in where they name none."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return list(arguments)
        if "=" not in argument and argument != "--help":
            next(rest, None)  # the value of the option
    return [str(file), *arguments]


def check_format(format: str) -> None:
    """Refuse a format that results can't be printed in.

    Raises:
        ConfigError: It is none.
    """
    from rayhive.report.formats import FORMATS

    if format not in FORMATS:
        raise ConfigError(unknown("--format", format, FORMATS))


@contextmanager
def _progress(study: Study) -> Iterator[Progress]:
    """Show progress as the standard error output can take it."""
    from rayhive.sweep.progress_plain import PlainProgress

    if not sys.stderr.isatty():
        yield PlainProgress(study.config)
        return
    from rayhive.sweep.progress_live import LiveProgress

    with LiveProgress(study.config) as live:
        yield live


def _write_tables(folder: Path) -> None:
    from rayhive.report.frames import write_parquet
    from rayhive.report.results import load_results
    from rayhive.sweep.files import writable

    if (folder / "trials").is_dir():
        with writable(folder):
            write_parquet(load_results(folder), folder)


def _print_results(folder: Path, format: str) -> None:
    from rayhive.report.render import results_text

    width = shutil.get_terminal_size((120, 24)).columns
    color = sys.stdout.isatty()
    print(results_text(folder, format, console_width=width, color=color, complain=complain))


def _print_end(done: Done, folder: Path) -> None:
    failed = f", {done.failed} failed" if done.failed else ""
    again = shlex.join(["rayhive", "results", str(folder)])
    complain(f"{done.trials} trials{failed}; {folder} (again: {again})")


def _command() -> list[str]:
    """Return the command that this process was started with, as its user would type it."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["rayhive", *sys.argv[1:]]


def _plan_lines(plan: Plan) -> Iterator[str]:
    from rayhive.sweep.eta import clock

    config = plan.study.config
    space = "" if plan.space_size is None else f" (the space has {plan.space_size} configurations)"
    yield f"{config.name}: {config.workload.label} ({plan.study.data} data)"
    yield (
        f"  {plan.trials} trials{space} x {len(config.scenarios)} scenarios x "
        f"{config.replicates} replicates = {plan.replicates} replicates of "
        f"{config.swarm.peers} peers"
    )
    if plan.study.twin_added:
        yield "  the scenario none was added: the others are compared with it"
    for planned in plan.scenarios:
        yield f"  {planned.name}: {planned.describe()}"
    rounds = "" if plan.rounds is None else f"{plan.rounds} rounds, "
    yield (
        f"  each at most {rounds}{clock(config.budget.seconds_per_replicate)} of training; "
        f"all at most {clock(plan.longest_s)}, and some seconds each to start"
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
