"""Check the references of the documentation: links, headings, and paths and tests in code.

Usage: ``python scripts/check_links.py [FILE ...]``; without files, every Markdown file of the
repository. Prints one line for each broken reference. The exit code is 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("*.md", "docs/**/*.md", "tests/*.md", "benchmarks/*.md", "experiments/**/*.md")

#: Folders that are not part of the repository.
_UNTRACKED = frozenset({".venv", "build", "dist", "runs", "site"})

_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
#: File that a page asks the reader to write.
_EXAMPLE = re.compile(r"\bWrite\s+`([^`\n]+)`")
_PATH = re.compile(r"(?<![\w./:-])([\w.-]+/[\w./*-]*[\w*/-])(?![\w(])")
#: Name of a test function; shorter names are those of files, also of data.
_TEST = re.compile(r"(?<![\w/])test(?:_[a-z0-9]+){2,}\b(?!\.)")


def slug(heading: str) -> str:
    """Return the anchor that Markdown renderers derive from a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    return {slug(heading) for heading in _HEADING.findall(_FENCE.sub("", document.read_text()))}


def _broken_links(document: Path, prose: str) -> Iterator[str]:
    for target in _LINK.findall(prose):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # another site
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"link to {target}: no such heading"


def _broken_paths(text: str, root: Path) -> Iterator[str]:
    """Yield the paths into the repository that do not exist.

    A path is checked if it starts with a folder of the repository; ``runs/NAME`` does not.
    """
    for path in dict.fromkeys(_PATH.findall(text)):
        top = path.split("/")[0]
        if top in _UNTRACKED or not (root / top).is_dir():
            continue
        if not any(root.glob(path.rstrip("/"))):
            yield f"path {path}: not in the repository"


@cache
def _tests(root: Path) -> frozenset[str]:
    """Return the names of the test functions and of their files."""
    files = [*(root / "tests").glob("**/test_*.py")]
    functions = (re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")) for file in files)
    return frozenset({file.stem for file in files}.union(*functions))


def _broken_tests(text: str, root: Path) -> Iterator[str]:
    """Yield the names of tests that do not exist."""
    for name in dict.fromkeys(_TEST.findall(text)):
        if name not in _tests(root):
            yield f"test {name}: not in the repository"


def broken(document: Path, root: Path = ROOT) -> list[str]:
    """Return one line for each broken reference in ``document``."""
    text = document.read_text()
    fences = "\n".join(match.group() for match in _FENCE.finditer(text))
    prose = _FENCE.sub("", text)
    examples = set(_EXAMPLE.findall(prose))
    code = "\n".join(item for item in _CODE.findall(prose) if item not in examples)
    problems = [
        *_broken_links(document, _CODE.sub("", prose)),
        *_broken_paths(f"{code}\n{fences}", root),
        *_broken_tests(code, root),
    ]
    return [f"{document.relative_to(root)}: {problem}" for problem in problems]


def main(names: list[str]) -> int:
    """Check the given documents, by default all of them."""
    documents = [Path(name).resolve() for name in names] or sorted(
        {document for pattern in DOCUMENTS for document in ROOT.glob(pattern)}
    )
    problems = [problem for document in documents for problem in broken(document)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
