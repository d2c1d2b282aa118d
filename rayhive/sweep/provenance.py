"""Provenance of a run: code, data, packages, machine and link.

The fingerprint of a workload holds digests of the user's code and of the data that it names. A
replicate records it in ``code``, and replicates of different code never share a row. rayhive's own
code is identified by ``git_revision`` and ``versions`` instead.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import itertools
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

import rayhive
from rayhive.cluster.node import machine
from rayhive.errors import RayhiveError, installed_folders
from rayhive.spec import Model, SweepConfig, WorkloadConfig

#: Size from which a data file is identified by size and modification time [B].
LARGE = 2**28
#: Number of files from which a folder is identified by their names and sizes.
MANY = 2000
#: Choices of ``--code`` for a run folder whose code has changed.
CHOICES = ("refuse", "keep-apart", "accept")

_CHECKOUT = Path(__file__).parents[2]


class Fingerprint(Model):
    """Code and data of a workload.

    Attributes:
        code: Source file, by the path of its module -> digest of its content.
        data: Key that names a data file, and its path below that -> digest of its content.
        kind: Whether the workload's data is ``real`` or ``generated``.
        accepted: Digest of earlier code that the user declared equivalent.
    """

    model_config = ConfigDict(extra="ignore")

    code: dict[str, str]
    data: dict[str, str]
    kind: str | None = None
    accepted: str | None = None

    @property
    def digest(self) -> str | None:
        """Digest of code and data; None for a workload without code or data of the user's."""
        if self.accepted is not None or not (self.code or self.data):
            return self.accepted
        return _digest(repr((sorted(self.code.items()), sorted(self.data.items()), self.kind)))

    def differences(self, before: Fingerprint) -> list[str]:
        """Return the files that are new, gone or changed since ``before``, as texts."""
        found = []
        for old, new in ((before.code, self.code), (before.data, self.data)):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    verb = "new" if name not in old else "gone" if name not in new else "changed"
                    found.append(f"{verb}: {name}")
        if self.kind != before.kind and None not in (self.kind, before.kind):
            found.append(f"data was {before.kind} and is {self.kind}")
        return found

    def check_unchanged(self, workload: WorkloadConfig) -> None:
        """Compare the code with that of a workload now.

        Raises:
            RayhiveError: A file has changed.
        """
        now = self.model_copy(update={"code": _code_digests(workload)})
        differences = now.differences(self)
        if differences:
            raise RayhiveError(
                f"the workload changed while the sweep ran ({'; '.join(differences)}); finished "
                "replicates are kept. Restore it and run the same command, or choose with --code "
                "how the rest is treated"
            )


def read_fingerprint(given: object) -> Fingerprint | None:
    """Return the fingerprint in ``provenance.json``, None if it has none."""
    try:
        return Fingerprint.model_validate(given)
    except ValidationError:
        return None


def fingerprint_of(
    workload: WorkloadConfig, data_files: Iterable[Path] = (), kind: str | None = None
) -> Fingerprint:
    """Return the fingerprint of a workload.

    Args:
        workload: Its entry in the study. Arguments that are paths of existing files or folders
            count as data.
        data_files: Further files and folders of data that the workload names.
        kind: Whether the data is ``real`` or ``generated``.
    """
    code = _code_digests(workload)
    return Fingerprint(code=code, data=_data_digests(workload, data_files), kind=kind)


def collect(config: SweepConfig) -> dict[str, Any]:
    """Return the content of ``provenance.json`` for this process on this machine."""
    revision, dirty = git_state(_CHECKOUT)
    links = ((name, item.link) for name, item in (config.swarm.node_classes or {}).items())
    return {
        "study": config.name,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        # A checkout that is not installed has no package metadata.
        "versions": {**machine.versions(), "rayhive": rayhive.__version__},
        "hardware": machine.facts(),
        "link": "; ".join(f"{name}: {link}" for name, link in links if link) or "none",
    }


@functools.cache
def code_revision() -> str | None:
    """Return the git revision of the running code, marked if the code has changed since."""
    revision, dirty = git_state(_CHECKOUT)
    return f"{revision} with changes" if dirty else revision


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return the git revision of the code below ``root``, and whether it has changed since.

    Both are None if rayhive does not run from its own checkout: an installed package may lie inside
    the repository of another project.
    """
    if _git(root, "ls-files", "--error-unmatch", "rayhive/__init__.py") is None:
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", ".")
    return revision, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or takes too long."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# -- code --------------------------------------------------------------------------------------


def _code_digests(workload: WorkloadConfig) -> dict[str, str]:
    """Return the digests of the workload's module and of the user's modules that it imports."""
    if workload.import_path is None:
        return {}
    found: dict[str, str] = {}
    paths = (workload.import_path, workload.data)
    waiting = [path.partition(":")[0] for path in paths if path is not None]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, path in _files(module):
            key = f"{name.replace('.', '/')}{'/__init__' * (path.stem == '__init__')}{path.suffix}"
            if key not in found:
                found[key] = _file_digest(path)
                package = name if path.stem == "__init__" else name.rpartition(".")[0]
                waiting += _imports(path, package)
    return found


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield a module of the user's with its file, after the packages that contain it."""
    name, _, rest = module.partition(".")
    spec = None
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
    # Found without importing the packages around a module, which would run the user's code.
    while spec is not None:
        places = list(spec.submodule_search_locations or ())
        source = None if spec.origin is None else Path(spec.origin)
        if not all(map(_is_own, [source] if source else map(Path, places))):
            return
        if source is not None and source.suffix == ".py" and source.is_file():
            yield name, source
        part, _, rest = rest.partition(".")
        if not part:
            return
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(part, places)


def _is_own(path: Path) -> bool:
    """Return whether code is the user's: neither installed nor part of rayhive."""
    found = path.resolve()
    return not {"site-packages", "dist-packages"} & set(found.parts) and not any(
        found.is_relative_to(place) for place in installed_folders()
    )


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the names that a source file imports, those of possible submodules included."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # more dots than packages
                name = "." * node.level + (node.module or "")
                module = importlib.util.resolve_name(name, package)
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


# -- data --------------------------------------------------------------------------------------


def _data_digests(workload: WorkloadConfig, data_files: Iterable[Path]) -> dict[str, str]:
    named = [("data_files", Path(path)) for path in data_files]
    named += [(f"args.{key}", path) for key, path in _paths(workload.args)]
    named += [(f"data_args.{key}", path) for key, path in _paths(workload.data_args)]
    found: dict[str, str] = {}
    for place, path in named:
        for name, digest in _digests_at(path):
            key = f"{place}/{name}" if name else place
            same = itertools.count(2)  # files of one name in several folders
            while key in found:
                key = f"{place}/{name} ({next(same)})"
            found[key] = digest
    return found


def _digests_at(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name below a path and the digest of each file there; one for a large folder."""
    if path.is_file():
        yield path.name, _file_digest(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if len(files) > MANY:
            yield "", _digest(repr([(str(f), f.stat().st_size) for f in files]))
        else:
            yield from ((str(f.relative_to(path)), _file_digest(f)) for f in files)


def _paths(given: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the arguments that name an existing file or folder.

    A folder with the working directory, such as ``/`` or ``..``, holds more than data: the text
    means something else.
    """
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", path) for name, path in _paths(value))
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, str) and 0 < len(item) < 4096 and "\0" not in item:
                path = Path(item)
                try:
                    if path.exists() and not Path.cwd().is_relative_to(path.resolve()):
                        yield key, path
                except OSError:  # not a path
                    continue


def _file_digest(path: Path) -> str:
    try:
        found = path.stat()
        if found.st_size > LARGE:
            return _digest(repr((found.st_size, found.st_mtime_ns)))
        return _content_digest(path, found.st_size, found.st_mtime_ns)
    except OSError as error:
        return f"not readable: {error.strerror}"


@functools.cache
def _content_digest(path: Path, size: int, modified_ns: int) -> str:
    """Return the digest of a file's content; an unchanged file is read once."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
