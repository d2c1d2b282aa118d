"""docs/events.md is what scripts/events_page.py writes."""

from __future__ import annotations

from scripts.events_page import PAGE, page


def test_the_page_describes_the_present_records() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/events_page.py"
