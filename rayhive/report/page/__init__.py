"""The report of a run: one HTML file that opens offline.

* :mod:`~rayhive.report.page.run_data` reads the events that the sections need.
* One module for each section computes its numbers and drawings: ``verdict``, ``table``, ``front``,
  ``curves``, ``round_time``, ``timeline``, ``notice``, ``importance``, ``winner_map``,
  ``provenance``.
* :mod:`~rayhive.report.page.svg` draws charts, ``templates/`` turns everything into a page.
* :mod:`~rayhive.report.page.write` combines these.
"""

from __future__ import annotations
