"""The documentation is a site without a broken link, with the docstrings of the Python API."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rayhive import api

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    build = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *build], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= menu


def test_the_page_of_the_api_documents_all_of_it(site: Path) -> None:
    page = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in api.__all__:
        assert f'id="rayhive.api.{name}"' in page, name
    assert not re.search(r":\w+:<code>", page), "a role of Sphinx is shown as text"
