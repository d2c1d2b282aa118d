"""Formats of cloud availability traces, one file and one line each.

A format recognises a text and parses each row into a :class:`~.trace.Record`.
:func:`~.trace.read_trace` assembles the trace.
"""

from __future__ import annotations

from typing import Any

from rayhive.registry import Registry

#: Each entry is a :class:`rayhive.faults.traces.trace.TraceFormat`.
TRACE_FORMATS: Registry[Any] = Registry("trace format")
TRACE_FORMATS.register_lazy("bamboo", "rayhive.faults.traces.bamboo:Bamboo")
TRACE_FORMATS.register_lazy("live-counts", "rayhive.faults.traces.live_counts:LiveCounts")
TRACE_FORMATS.register_lazy("parcae", "rayhive.faults.traces.parcae:Parcae")
TRACE_FORMATS.register_lazy("skypilot", "rayhive.faults.traces.skypilot:SkyPilot")
