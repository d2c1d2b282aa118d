"""The command line: parse, call, print. What it calls is imported when it is called."""

from __future__ import annotations

from rayhive.cli.main import app, main

__all__ = ["app", "main"]
