"""Names of the scenarios of a study: of the library, or paths of the user's own files."""

from __future__ import annotations

import re
from pathlib import PurePath

#: A scenario's name is part of the names of folders and actors.
SCENARIO_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")


def is_path(scenario: str) -> bool:
    """Return whether a scenario is given by the path of its file, and not by name."""
    return "/" in scenario or scenario.endswith((".yaml", ".yml"))


def scenario_label(scenario: str) -> str:
    """Return the name of a scenario that is given by name or by path."""
    return PurePath(scenario).stem if is_path(scenario) else scenario
