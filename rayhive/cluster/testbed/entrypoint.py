"""Script that runs ``ray start`` without Ray's unused optional parts.

``--include-dashboard=false`` still imports most of the dashboard in three processes of every node,
one after the other, and a head starts a server for ``ray://``. Without them the start takes 4.1 s
instead of 7.5 s on two cores. There are no public switches; in a version of Ray without the private
ones, the start is slow.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run ``ray start`` with the arguments of this script."""
    del sys.path[0]  # this script's folder, whose modules must not hide top-level modules
    refuse_dashboard()
    _refuse("ray.scripts.scripts", "get_ray_client_dependency_error")
    sys.argv = ["ray", "start", *sys.argv[1:]]
    importlib.import_module("ray.scripts.scripts").main()


def refuse_dashboard() -> None:
    """Make Ray start daemons as if its dashboard were not installed, in this process."""
    _refuse("ray._private.utils", "get_dashboard_dependency_error")


def _refuse(module: str, switch: str) -> None:
    """Make Ray treat the packages of an optional part as not installed."""
    found = importlib.import_module(module)
    if hasattr(found, switch):
        setattr(found, switch, lambda: ImportError("rayhive does not need it"))


if __name__ == "__main__":
    main()
