"""Command line: parses arguments, calls :mod:`rayhive.api`, prints the outcome.

A command imports its dependencies when it runs, so that ``rayhive --help`` is quick.
"""

from __future__ import annotations

from rayhive.cli.main import app, main

__all__ = ["app", "main"]
