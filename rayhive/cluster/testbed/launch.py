"""``ray start`` without the parts of a dashboard, run as a script.

``--include-dashboard=false`` still imports most of it in three processes of every node, one after
the other. There is no public switch; where the private one is missing, the start is slow again.
"""

from __future__ import annotations

import importlib
import sys

_SWITCH = "get_dashboard_dependency_error"


def main() -> None:
    """Start what the arguments say."""
    del sys.path[0]  # this script's folder, whose modules are nobody's top level
    utils = importlib.import_module("ray._private.utils")
    if hasattr(utils, _SWITCH):
        setattr(utils, _SWITCH, _without_dashboard)
    sys.argv = ["ray", "start", *sys.argv[1:]]
    importlib.import_module("ray.scripts.scripts").main()


def _without_dashboard() -> ImportError:
    return ImportError("rayhive needs no dashboard")


if __name__ == "__main__":
    main()
