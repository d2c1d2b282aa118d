"""Application of the command line; turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from rayhive.cli import machine, replay, results, scenario, scenario_run, study, testbed, train
from rayhive.cli.text import complain
from rayhive.errors import RayhiveError

app = typer.Typer(
    name="rayhive",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Measure which settings of decentralised training pay off on slow links and
unreliable machines.

Try: `rayhive sweep experiments/quickstart.yaml`, then `rayhive results runs/quickstart`.

Exit codes: 0 done, 1 failed, 2 bad input, 130 and 143 interrupted.""",
)
app.command("sweep")(study.sweep)
app.command("retry")(study.retry)
app.command("plan")(study.plan)
app.command("results")(results.results)
app.command("replay")(replay.replay)
scenario.app.command("run")(scenario_run.run)
app.add_typer(scenario.app, name="scenario")
app.add_typer(testbed.app, name="testbed")
app.command("train")(train.train)
app.command("status")(machine.status)
app.command("stop")(machine.stop)
app.command("doctor")(machine.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments; by default those of the process.

    Returns:
        The exit code.
    """
    try:
        app(None if arguments is None else list(arguments), prog_name="rayhive")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except RayhiveError as error:
        complain(str(error))
        return error.exit_code
    return 0


def script(command: str, arguments: Sequence[str] | None = None) -> int:
    """Run one command, for a script that is a synonym of it.

    Args:
        command: Name of the command.
        arguments: Its arguments; by default those of the process.
    """
    return main([command, *(sys.argv[1:] if arguments is None else arguments)])
