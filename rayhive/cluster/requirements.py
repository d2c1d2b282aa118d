"""Comparison of the installed packages with the requirements of rayhive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

from rayhive.cluster.node import machine


def compare() -> tuple[list[str], list[str]]:
    """Compare the installed packages with the requirements.

    Returns:
        A text for each requirement that is not met, and the versions of the main packages.
    """
    wrong, found = [], []
    for name, wanted in _requirements():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if name in machine.PACKAGES:
            found.append(f"{name} {version}")
        wrong += [
            f"{name} {version} is not {bound}" for bound in wanted if not is_within(version, bound)
        ]
    return wrong, found


def _requirements() -> Iterator[tuple[str, list[str]]]:
    """Yield name and version bounds of every unconditional dependency."""
    try:
        lines = metadata.requires("rayhive") or []
    except metadata.PackageNotFoundError:
        lines = [name for name in machine.PACKAGES if name != "rayhive"]
    for line in lines:
        if ";" in line:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?$", line.strip())
        if match is not None:
            yield match[1], [bound.strip() for bound in match[2].split(",") if bound.strip()]


def is_within(version: str, bound: str) -> bool:
    """Return whether a version meets a bound such as ``>=2.6``."""
    match = re.match(r"(>=|<=|==|<|>|!=|~=)\s*([0-9.]+)", bound)
    if match is None:
        return True
    mine, theirs = _numbers(version), _numbers(match[2])
    width = max(len(mine), len(theirs))
    mine += (0,) * (width - len(mine))
    theirs += (0,) * (width - len(theirs))
    return {
        ">=": mine >= theirs,
        "<=": mine <= theirs,
        "==": mine == theirs,
        "<": mine < theirs,
        ">": mine > theirs,
        "!=": mine != theirs,
        "~=": mine >= theirs,
    }[match[1]]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
