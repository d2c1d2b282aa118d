"""``rayhive status``, ``stop`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from rayhive.cli.text import Address, print_json, print_rows

Format = Annotated[str, typer.Option(help="table or json.")]


def status(address: Address = None, format: Format = "table") -> None:
    """Show the running replicates and the state of each peer.

    Examples: `rayhive status`, `rayhive status --address 10.0.0.1:6379`
    """
    from rayhive.cluster.control import cluster_status

    found = cluster_status(address)
    if format == "json":
        print_json(found)
    elif not found:
        print("no replicate is running")
    for replicate in found if format != "json" else ():
        _print_replicate(replicate)


def stop(
    name: Annotated[str, typer.Argument(help="The study.", show_default=False)],
    address: Address = None,
) -> None:
    """End a running sweep on this machine or on a cluster; finished replicates are kept.

    Example: `rayhive stop quickstart`
    """
    from rayhive.cluster.control import stop_study

    stopped = stop_study(address, name)
    print(f"stopped {', '.join(stopped)}" if stopped else f"no replicate of {name!r} is running")


def doctor(format: Format = "table") -> None:
    """Check this machine and print how to repair each fault.

    Exit code 1 if a requirement of rayhive is missing.
    """
    from dataclasses import asdict

    from rayhive.cluster.doctor import doctor as examine

    checks = examine()
    if format == "json":
        print_json([asdict(check) for check in checks])
    else:
        rows = [{**asdict(check), "verdict": _verdict(check)} for check in checks]
        print_rows(rows, {"verdict": "", "name": "check", "detail": "found", "mend": "repair"})
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(1)


def _verdict(check: Any) -> str:
    if check.ok:
        return "ok"
    return "bad" if check.needed else "note"


def _print_replicate(replicate: Mapping[str, Any]) -> None:
    peers: Iterable[tuple[str, Mapping[str, Any]]] = sorted(dict(replicate["peers"]).items())
    seconds, budget = replicate["seconds"], replicate["budget_seconds"]
    if seconds is None:  # the supervisor does not answer
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
