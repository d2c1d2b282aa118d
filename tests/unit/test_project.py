"""Rules for the repository as a whole: packaging, file lengths, imports, leaks."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import check_links
from tests import leaks
from tests.leaks import TOKEN_VARIABLE, Watch, survivors

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("dev", "docs")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    """Return the pinned version of each package; every line that is not a comment is a pin."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert all(pairs), [line for line, pair in zip(lines, pairs, strict=True) if pair is None]
    return {canonicalize_name(p.group(1)): Version(p.group(2)) for p in pairs if p is not None}


def direct_requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = project["project"]["optional-dependencies"]
    lines = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(line for extra in EXTRAS for line in extras[extra]),
    ]
    found = map(Requirement, lines)
    return [each for each in found if each.name != "rayhive"]  # an extra that names another


def tracked_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            yield ROOT / name


def test_links_of_the_documentation_lead_somewhere() -> None:
    documents = sorted({d for pattern in check_links.DOCUMENTS for d in ROOT.glob(pattern)})
    assert ROOT / "README.md" in documents
    assert [problem for document in documents for problem in check_links.broken(document)] == []


def test_link_check_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "rayhive").mkdir()
    (tmp_path / "there.md").write_text("# A heading, with `code`\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_that_is_there() -> None: ...\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[ok](there.md#a-heading-with-code) [site](https://example.org/x) [gone](gone.md)\n"
        "[no heading](there.md#other) `rayhive/` `rayhive/gone.py` `runs/NAME/x` `a/b`\n"
        "Write `rayhive/new.py`. `test_that_is_gone` `test_that_is_there` `test_batch`\n"
        "```\npython rayhive/also_gone.py # [not a link](nowhere.md)\n```\n"
    )
    assert check_links.broken(page, tmp_path) == [
        "page.md: link to gone.md: no such file",
        "page.md: link to there.md#other: no such heading",
        "page.md: path rayhive/gone.py: not in the repository",
        "page.md: path rayhive/also_gone.py: not in the repository",
        "page.md: test test_that_is_gone: not in the repository",
    ]


def test_constraints_pin_a_valid_version_of_each_dependency(
    project: dict[str, Any], pins: dict[str, Version]
) -> None:
    for requirement in direct_requirements(project):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} is not pinned"
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement}: {pin}"


def test_constraints_pin_what_the_dependencies_need_in_turn(
    project: dict[str, Any], pins: dict[str, Version]
) -> None:
    queue = direct_requirements(project)
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        assert key[0] in pins, f"{requirement} is not pinned"
        try:
            needed = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        for needs in map(Requirement, needed):
            extras = requirement.extras or {""}
            if needs.marker is None or any(needs.marker.evaluate({"extra": e}) for e in extras):
                queue.append(needs)
    assert len(seen) > 50  # the walk went somewhere


def test_nothing_asks_for_one_build_of_torch(project: dict[str, Any]) -> None:
    (torch,) = [
        Requirement(line)
        for line in project["project"]["dependencies"]
        if Requirement(line).name == "torch"
    ]
    assert torch.url is None
    assert all(part.operator in {">=", "<"} for part in torch.specifier)


def test_files_of_the_package_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in (ROOT / "rayhive").rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > 400} == {}


#: Names that are public although they begin with an underscore.
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}


def private_accesses(source: str) -> list[str]:
    """Return the accesses to private attributes of objects other than ``self`` and ``cls``."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return [
        ast.unparse(node)
        for node in attributes
        if re.match(r"_(?!_)", node.attr)
        and node.attr not in PUBLIC
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def test_tests_use_public_interfaces() -> None:
    """An access to a private attribute shows a missing seam; some of other packages have to be."""
    assert private_accesses("a._b; self._c; super()._d; a.__e__; cls._f._g") == [
        "a._b",
        "cls._f._g",
    ]
    found = {
        str(path.relative_to(ROOT)): accesses
        for path in (ROOT / "tests").rglob("*.py")
        if (accesses := private_accesses(path.read_text(encoding="utf-8")))
    }
    assert sum(map(len, found.values())) <= 24, found


def test_no_file_names_a_folder_of_a_users_machine() -> None:
    folder = re.compile(r"(?<![\w.~/-])/(?:home|root|work|Users|mnt/[a-z]+)/[\w.-]")
    found = []
    for path in tracked_files():
        if path.suffix in {".png", ".parquet", ".db"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if folder.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert found == []


def test_continuous_build_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_every_module_stands_in_every_import_contract(project: dict[str, Any]) -> None:
    """A module that a contract forgets could import what it likes."""
    modules = {
        f"rayhive.{path.stem}"
        for path in (ROOT / "rayhive").iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__"))
        or (path / "__init__.py").exists()
    }
    may_import = {
        "hivemind": {
            f"rayhive.{package}"
            for package in ("strategy", "optim", "averaging", "membership", "compression")
        },
        "ray": {"rayhive.cluster"},
        "optuna": {"rayhive.sweep", "rayhive.report"},
    }
    contracts = {c["id"]: c for c in project["tool"]["importlinter"]["contracts"]}
    for name, allowed in may_import.items():
        listed = set(contracts[name]["source_modules"])
        assert listed | allowed == modules, name
        assert not listed & allowed, name


def test_imports_point_down() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["rayhive", "rayhive.api", "rayhive.cli", "rayhive.workloads"])
def test_import_is_light(module: str) -> None:
    """Bad input is refused, and ``--help`` printed, before anything heavy is loaded."""
    heavy = {"torch", "ray", "hivemind", "lightning", "optuna", "pandas"}
    code = f"import sys, {module}; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_check_of_survivors_finds_one_and_ends_it() -> None:
    """The check that ends the session works, shown on an orphan of a made-up session."""
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid)"
    )
    token = f"test-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {TOKEN_VARIABLE: token},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    orphan = psutil.Process(int(done.stdout))
    assert [process.pid for process in survivors(token)] == [orphan.pid]
    (line,) = Watch(token).processes(patience_s=0.1)
    assert str(orphan.pid) in line
    psutil.wait_procs([orphan], timeout=10)
    assert survivors(token) == []


def test_check_of_survivors_finds_stale_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="rht-", dir="/tmp") as name:  # short, for sockets
        monkeypatch.setattr(leaks, "SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(leaks, "SOCKETS", Path(name))
        watch = Watch("token")
        (tmp_path / f"torch_{os.getpid()}_1_0").touch()  # in use: this process lives
        (tmp_path / "torch_999999999_1_0").touch()
        (tmp_path / "sem.loky-999999999-ab").touch()
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(f"{name}/hivemind-stale.sock")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{name}/hivemind-bound.sock")
            assert set(watch.new_files(patience_s=0.0)) == {
                f"file {name}/hivemind-stale.sock",
                f"file {tmp_path}/torch_999999999_1_0",
                f"file {tmp_path}/sem.loky-999999999-ab",
            }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_session_that_leaves_a_process_behind_fails(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_leak.py").write_text(
        "import subprocess, sys\n"
        "def test_leak():\n"
        "    code = 'import time; print(flush=True); time.sleep(60)'\n"
        "    command = [sys.executable, '-c', code]\n"
        "    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
        "    child.stdout.readline()\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from tests import leaks\n"
        "from tests.conftest import pytest_configure\n"
        "leaks.PATIENCE_S = 0.1\n"
    )
    options = ["-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider", f"-n{workers}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    pids = re.findall(r"^process (\d+): .*time.sleep", done.stdout, re.MULTILINE)
    assert len(pids) == 1 and done.returncode == pytest.ExitCode.TESTS_FAILED
    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if p.pid == int(pids[0])], 10)
    assert alive == []
