"""Faults and the scenarios that plan them; each is one file and one line here."""

from __future__ import annotations

from rayhive.registry import SCENARIOS

SCENARIOS.register_lazy("none", "rayhive.faults.none:NoFaults")
