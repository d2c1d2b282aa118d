"""Report: from a run folder to its results table, computed from the events alone.

* :mod:`~rayhive.report.results` reads a run folder.
* :mod:`~rayhive.report.frames` turns results into data frames and Parquet files.
* :mod:`~rayhive.report.table_model` and :mod:`~rayhive.report.table_notes` choose the contents of
  the table, :mod:`~rayhive.report.formats` writes them.
* :mod:`~rayhive.report.render` combines these for ``rayhive results``.

Heavy packages are imported only when they are used.
"""

from __future__ import annotations
