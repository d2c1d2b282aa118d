"""Generators: the sections of a scenario file that plan faults, one file and one line each."""

from __future__ import annotations

from typing import Any

from rayhive.registry import Registry

#: Each entry is a :class:`rayhive.faults.generators.base.Generator` with one field of its name.
GENERATORS: Registry[Any] = Registry("generator")
GENERATORS.register_lazy("acts", "rayhive.faults.generators.acts:Acts")
GENERATORS.register_lazy("chaos", "rayhive.faults.generators.chaos:Chaos")
GENERATORS.register_lazy("trace", "rayhive.faults.generators.replay:TraceReplay")
