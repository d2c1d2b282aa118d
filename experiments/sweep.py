"""Run a study and print its results: the same as ``rayhive sweep``, the quickstart by default.

    python experiments/sweep.py [FILE] [--set k=v …] [--address A] [--out DIR] [--format F]
    ray job submit --working-dir . -- python experiments/sweep.py

It needs no installation of rayhive: it finds the checkout that it lies in.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the command line with the quickstart in place of a file that is not given."""
    sys.path.insert(0, str(HERE.parent))
    from rayhive.cli.main import script

    return script("sweep", HERE / "quickstart.yaml")


if __name__ == "__main__":
    sys.exit(main())
