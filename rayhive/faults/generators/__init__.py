"""Generators: the sections of a scenario file that plan faults, one file each."""

from __future__ import annotations

from typing import Any

from rayhive.registry import Registry

#: Each entry is a :class:`rayhive.faults.generators.base.Generator` with one field of its name.
GENERATORS: Registry[Any] = Registry("generator")
GENERATORS.register_files("rayhive.faults.generators")
