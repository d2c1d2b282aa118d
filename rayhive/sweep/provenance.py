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
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
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
    return {
        "study": config.name,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_revision": revision,
        "git_dirty": dirty,
        # A checkout that is not installed has no package metadata.
        "versions": {**machine.versions(), "rayhive": rayhive.__version__},
        "hardware": machine.facts(),
        "link": _link(config),
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


def _link(config: SweepConfig) -> str:
    """Return the shaping of the links by node class, or ``none``."""
    classes = config.swarm.node_classes or {}
    shaped = {name: item.link for name, item in classes.items() if item.link is not None}
    return "; ".join(f"{name}: {link}" for name, link in shaped.items()) or "none"


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
    return {name: _file_digest(path) for name, path in _code(workload).items()}


def _code(workload: WorkloadConfig) -> dict[str, Path]:
    """Return the source files of the workload's module and of the user's modules it imports."""
    if workload.import_path is None:
        return {}
    found: dict[str, Path] = {}
    waiting = [workload.import_path.partition(":")[0]]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, path in _files(module):
            key = f"{name.replace('.', '/')}{'/__init__' * (path.stem == '__init__')}{path.suffix}"
            if key not in found:
                found[key] = path
                package = name if path.stem == "__init__" else name.rpartition(".")[0]
                waiting += _imports(path, package)
    return found


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield a module of the user's with its file, after the packages that contain it."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None:
        return
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if spec.origin is not None and spec.origin.endswith(".py"):
        if not (_is_own(Path(spec.origin)) and Path(spec.origin).is_file()):
            return
        yield top, Path(spec.origin)
    elif not places or not all(map(_is_own, places)):
        return
    name = top
    for part in rest:
        name = f"{name}.{part}"
        files = [place / part / "__init__.py" for place in places]
        files += [place / f"{part}.py" for place in places]
        for file in files:
            if file.is_file():
                yield name, file
                break
        places = [place / part for place in places]


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
            parts = package.split(".") if package else []
            around = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*around, *([node.module] if node.module else [])])
            if module:
                yield module
            yield from (f"{module}.{a.name}" if module else a.name for a in node.names)


# -- data --------------------------------------------------------------------------------------


def _data_digests(workload: WorkloadConfig, data_files: Iterable[Path]) -> dict[str, str]:
    named = [("data_files", Path(path)) for path in data_files]
    named += [(f"args.{key}", path) for key, path in _paths(workload.args)]
    found: dict[str, str] = {}
    for place, path in named:
        if path.is_file():
            found[f"{place}/{path.name}"] = _file_digest(path)
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            if len(files) > MANY:
                found[place] = _digest(repr([(str(f), f.stat().st_size) for f in files]))
                continue
            found |= {f"{place}/{f.relative_to(path)}": _file_digest(f) for f in files}
    return found


def _paths(given: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the arguments that name an existing file or folder."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", path) for name, path in _paths(value))
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, str) and 0 < len(item) < 4096 and "\0" not in item:
                path = Path(item)
                try:
                    if path.exists() and path.resolve() != Path.cwd():
                        yield key, path
                except OSError:  # not a path
                    continue


#: Path, size and modification time -> digest, so that an unchanged file is read once.
_READ: dict[tuple[str, int, int], str] = {}


def _file_digest(path: Path) -> str:
    try:
        found = path.stat()
        key = (str(path), found.st_size, found.st_mtime_ns)
        if found.st_size > LARGE:
            return _digest(repr(key[1:]))
        if key not in _READ:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
            _READ[key] = digest.hexdigest()[:16]
        return _READ[key]
    except OSError as error:
        return f"not readable: {error.strerror}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
