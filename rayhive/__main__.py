"""``python -m rayhive``."""

from __future__ import annotations

import sys

from rayhive.cli import main

sys.exit(main())
