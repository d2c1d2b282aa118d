"""The report: from a run folder to its results table, rebuilt from events alone.

:mod:`~rayhive.report.results` reads a folder, :mod:`~rayhive.report.frames` makes data frames and
Parquet of it, :mod:`~rayhive.report.table_model` decides what a reader sees,
:mod:`~rayhive.report.formats` writes it, :mod:`~rayhive.report.render` puts them together.
Nothing heavy is imported here.
"""

from __future__ import annotations
