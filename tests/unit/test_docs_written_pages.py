"""Pages of the documentation that scripts write are up to date."""

from __future__ import annotations

from types import ModuleType

import pytest

from scripts import events_page, scenarios_page


@pytest.mark.parametrize("script", [events_page, scenarios_page], ids=lambda each: each.PAGE.stem)
def test_the_page_describes_the_present_code(script: ModuleType) -> None:
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), f"run: python {script.__name__.replace('.', '/')}.py"
