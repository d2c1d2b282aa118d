"""Report: from a run folder to its results table, computed from the events alone.

* :mod:`~rayhive.report.results` reads a run folder into rows, data frames and Parquet files.
* :mod:`~rayhive.report.table` chooses the contents of the table, :mod:`~rayhive.report.text_table`
  and :mod:`~rayhive.report.markup` write them.
* :mod:`~rayhive.report.render` combines these for ``rayhive results``.

Heavy packages are imported only when they are used.
"""

from __future__ import annotations
