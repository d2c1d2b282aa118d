"""Python interface: run studies and scenarios, and load their results as data frames.

The functions take the options of the command line, which calls them. Errors are exceptions:
:class:`rayhive.errors.ConfigError` for bad input, :class:`rayhive.errors.RayhiveError` for other
failures, and :class:`rayhive.sweep.signals.Interrupted` for Ctrl-C and SIGTERM. ``rayhive.sweep``,
``rayhive.run_scenario`` and ``rayhive.load`` are shortcuts to three of them.
"""

from __future__ import annotations

from rayhive.api.recorded import compare, export, trace
from rayhive.api.report import watch_report, write_report
from rayhive.api.run import Run, load
from rayhive.api.scenarios import list_scenarios, plan_scenario, replay, run_scenario
from rayhive.api.studies import plan, replicates_needed, retry, sweep

__all__ = [
    "Run",
    "compare",
    "export",
    "list_scenarios",
    "load",
    "plan",
    "plan_scenario",
    "replay",
    "replicates_needed",
    "retry",
    "run_scenario",
    "sweep",
    "trace",
    "watch_report",
    "write_report",
]
