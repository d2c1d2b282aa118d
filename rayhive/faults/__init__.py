"""Fault kinds and the scenarios that plan them, one file each."""

from __future__ import annotations

from rayhive.faults.library import register_library
from rayhive.registry import FAULTS

FAULTS.register_files("rayhive.faults.kinds")
register_library()
