"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayhive.errors import ConfigError, Problem, unknown

#: Output formats of lists.
_LIST_FORMATS = ("table", "json")


def _list_format(value: str) -> str:
    if value not in _LIST_FORMATS:
        raise ConfigError(unknown("--format", value, _LIST_FORMATS))
    return value


def run_folder(text: str) -> Path:
    """Return the local folder of a run that is given by its folder or its URL."""
    from rayhive.remote import local_folder

    return local_folder(text)


def local_path(text: str) -> Path:
    """Return a path, and refuse a URL.

    Raises:
        ConfigError: It is a URL.
    """
    from rayhive.remote import is_url

    if is_url(text):
        raise ConfigError(Problem("--out", text, "a local path; only a sweep writes to a URL"))
    return Path(text)


StudyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The study, a YAML file.")]
RunFolder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="The run folder, or its URL.", parser=run_folder),
]
#: The same for commands that also write to the URL.
RunPlace = Annotated[str, typer.Argument(metavar="DIR", help="The run folder, or its URL.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one field of the study, as in replicates=3; may be repeated.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a running Ray cluster, or auto; by default RAY_ADDRESS, else a Ray "
        "on this machine that ends with the command."
    ),
]
RunningAddress = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a running Ray cluster, or auto; by default RAY_ADDRESS, else your "
        "sweeps on this machine that use no cluster."
    ),
]
ListFormat = Annotated[
    str, typer.Option(help="Output format: table or json.", callback=_list_format)
]
ResultsFormat = Annotated[
    str, typer.Option(help="Format of the results: table, md, csv, json or latex.")
]
Parallel = Annotated[
    str,
    typer.Option(
        metavar="K",
        help="Replicates that run at the same time; auto for as many as get nodes of their own "
        "(with swarm.share_nodes, cores of their own).",
    ),
]
