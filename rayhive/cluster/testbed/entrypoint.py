"""``ray start`` without the parts that nobody here uses, run as a script.

``--include-dashboard=false`` still imports most of the dashboard in three processes of every node,
one after the other, and a head starts a server for ``ray://``. There are no public switches; where
a private one is missing, the start is slow again.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Start what the arguments say."""
    del sys.path[0]  # this script's folder, whose modules are nobody's top level
    _refuse("ray._private.utils", "get_dashboard_dependency_error")
    _refuse("ray.scripts.scripts", "get_ray_client_dependency_error")
    sys.argv = ["ray", "start", *sys.argv[1:]]
    importlib.import_module("ray.scripts.scripts").main()


def _refuse(module: str, switch: str) -> None:
    """Have Ray believe that the packages of an optional part are not installed."""
    found = importlib.import_module(module)
    if hasattr(found, switch):
        setattr(found, switch, lambda: ImportError("rayhive does not need it"))


if __name__ == "__main__":
    main()
