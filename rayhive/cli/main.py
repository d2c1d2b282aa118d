"""Application of the command line; turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from rayhive.cli import machine, recorded, report, scenarios, studies, testbed
from rayhive.cli.output import complain
from rayhive.errors import RayhiveError
from rayhive.sweep.signals import Interrupted

#: Errors of the machine or of permissions, which need no traceback.
_NAMED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})

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
for of_studies in (studies.sweep, studies.retry, studies.plan, studies.results, studies.replay):
    app.command()(of_studies)
for of_recorded in (recorded.compare, recorded.trace, recorded.export, report.report):
    app.command()(of_recorded)
for of_machine in (machine.train, machine.status, machine.stop, machine.doctor):
    app.command()(of_machine)
app.add_typer(scenarios.app, name="scenario")
app.add_typer(testbed.app, name="testbed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments; by default those of the process.

    Returns:
        The exit code.
    """
    _prepare_output()
    try:
        app(None if arguments is None else list(arguments), prog_name="rayhive")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except Interrupted as stop:
        complain(f"{stop.reason}; {stop.kept} in {stop.folder}")
        return stop.exit_code
    except RayhiveError as error:
        complain(str(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in _NAMED:
            raise
        place = "" if error.filename is None else f": {error.filename}"
        complain(f"{error.strerror}{place}")
        return 1
    return 0


def _prepare_output() -> None:
    """Let output go to a stream that is closed, or whose encoding lacks ``≥`` or ``★``."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def script(name: str, default_file: Path) -> int:
    """Run one command with the arguments of the process, for a script that is a synonym of it.

    Args:
        name: Name of the command.
        default_file: Study that it runs if the arguments name none.
    """
    return main([name, *with_default_file(sys.argv[1:], default_file)])


def with_default_file(arguments: Sequence[str], file: Path) -> list[str]:
    """Return the arguments of ``sweep`` with ``file`` inserted if they name no study."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            return list(arguments)
        if "=" not in argument and argument != "--help":
            next(rest, None)  # the value of the option
    return [str(file), *arguments]
