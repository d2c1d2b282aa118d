"""``rayhive status``, ``stop`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from rayhive.cli.text import Address, print_json, print_rows

Format = Annotated[str, typer.Option(help="table or json.")]


def status(address: Address = None, format: Format = "table") -> None:
    """Show every replicate that runs, and what each of its peers is doing.

    Examples: `rayhive status`, `rayhive status --address 10.0.0.1:6379`
    """
    from rayhive.cluster.control import cluster_status

    found = cluster_status(address)
    if format == "json":
        print_json(found)
    elif not found:
        print("nothing runs")
    for replicate in found if format != "json" else ():
        _print_replicate(replicate)


def stop(
    name: Annotated[str, typer.Argument(help="The study.", show_default=False)],
    address: Address = None,
) -> None:
    """End a sweep that runs, on this machine or on a cluster; what is finished is kept.

    Example: `rayhive stop quickstart`
    """
    from rayhive.cluster.control import stop_study

    stopped = stop_study(address, name)
    print(f"stopped {', '.join(stopped)}" if stopped else f"nothing of {name!r} runs")


def doctor(format: Format = "table") -> None:
    """Say what is wrong with this machine, and how to mend it.

    Exits with 1 if something is missing that rayhive cannot work without.
    """
    from dataclasses import asdict

    from rayhive.cluster.doctor import doctor as examine

    checks = examine()
    if format == "json":
        print_json([asdict(check) for check in checks])
    else:
        rows = [{**asdict(check), "verdict": _verdict(check)} for check in checks]
        print_rows(
            rows, {"verdict": "", "name": "what", "detail": "found", "mend": "how to mend it"}
        )
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(1)


def _verdict(check: Any) -> str:
    if check.ok:
        return "ok"
    return "bad" if check.needed else "note"


def _print_replicate(replicate: Mapping[str, Any]) -> None:
    peers: Iterable[tuple[str, Mapping[str, Any]]] = sorted(dict(replicate["peers"]).items())
    seconds, budget = replicate["seconds"], replicate["budget_seconds"]
    if seconds is None:  # its supervisor does not answer
        print(f"{replicate['run_id']}: {replicate['phase']}")
        return
    print(f"{replicate['run_id']}: {replicate['phase']}, {seconds:.0f} of {budget:.0f} s")
    print(f"  {replicate['folder']}")
    print_rows(
        [{"peer": f"  {name}", **peer} for name, peer in peers],
        {
            "peer": "  peer",
            "state": "state",
            "round": "round>",
            "samples": "samples>",
            "samples_per_s": "samples/s>",
            "loss": "loss>",
            "host": "host",
            "error": "error",
        },
    )
