"""``rayhive report``: the file, the watch, and the page in a real browser."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayhive import api
from rayhive.cli import main
from rayhive.errors import ConfigError
from rayhive.report.page.write import write_report
from rayhive.spec import Configuration
from rayhive.sweep.run_folder import LOCK
from tests.fixtures.chromium import headless, needs_chromium
from tests.fixtures.html import Page
from tests.fixtures.logs import Log, make_spec, write_run


def test_the_report_is_written_into_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [Log()])
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert Page((run / "report.html").read_text(encoding="utf-8")).all("main")
    other = tmp_path / "other.html"
    assert main(["report", str(run), "--out", str(other)]) == 0 and other.is_file()


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "a run folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="a run folder"):
        next(api.watch_report(tmp_path / "nothing"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [api.write_report, lambda run: next(api.watch_report(run))])
def test_a_run_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, write: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [Log()])
    access = os.access

    def denied(path: Path, mode: int) -> bool:  # root may write everywhere
        return Path(path) != run and access(path, mode)

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "access", denied)
    monkeypatch.setattr("rayhive.report.page.write.write_atomically", refuse)
    with pytest.raises(ConfigError, match="in a folder that you may write") as caught:
        write(run)
    assert caught.value.problems[0].value == str(run / "report.html")


# -- watch -------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a run, as long as a driver works in it."""
    run = write_run(tmp_path / "run", [Log()])
    with (run / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run


def test_a_watched_report_follows_the_run_until_the_sweep_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log()])
    lock = (run / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    later = Log(make_spec(trial=1, configuration=Configuration(codec="float16")))
    acts = iter([lambda: None, lambda: later.write(run), lambda: None, lock.close])

    def wait(seconds: float) -> None:
        assert seconds >= 0.5
        next(acts)()

    written = []
    for path in api.watch_report(run, every_s=0.5, wait=wait):
        page = Page(path.read_text(encoding="utf-8"))
        rows = [each for each in page.all("tr") if "data-front" in each.attributes]
        written.append((len(rows), page.all("body")[0].attributes.get("data-reload")))
    # written at first and after the new replicate, and once more when the sweep has ended
    assert written == [(1, "0.5"), (2, "0.5"), (2, None)]


def test_an_interrupted_watch_leaves_a_report_that_does_not_reload(running: Path) -> None:
    def wait(seconds: float) -> None:
        raise KeyboardInterrupt

    written = api.watch_report(running, wait=wait)
    path = next(written)
    assert "data-reload=" in path.read_text(encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        next(written)
    assert "data-reload=" not in path.read_text(encoding="utf-8")


def test_the_watch_of_a_sweep_that_has_ended_writes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [Log()])
    assert main(["report", str(run), "--watch"]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"


# -- in a browser ------------------------------------------------------------------------------

#: Sorts by the time to the target, filters, and writes what a reader then sees into the title.
PROBE = """
<script>
var head = Array.from(document.querySelectorAll("#results thead th"));
var at = head.findIndex(th => th.textContent.includes("time_to_target_s"));
head[at].querySelector("button").click(); head[at].querySelector("button").click();
var rows = () => Array.from(document.querySelectorAll("#results tbody tr")).filter(r => !r.hidden);
var order = rows().map(r => r.cells[at].dataset.value).join(" ");
var hidden = getComputedStyle(document.querySelector("#results td.more")).display;
document.getElementById("all-columns").click();
var shown = getComputedStyle(document.querySelector("#results td.more")).display;
document.getElementById("filter").value = "float";
document.getElementById("filter").dispatchEvent(new Event("input"));
document.title = [order, head[at].getAttribute("aria-sort"), hidden, shown, rows().length,
  document.getElementById("shown").textContent,
  document.documentElement.scrollWidth <= document.documentElement.clientWidth,
  getComputedStyle(document.body).backgroundColor].join("|");
</script>
"""


def browse(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """Return the page as Chromium leaves it, and the messages of its console."""
    logged = ("--enable-logging=stderr", f"--user-data-dir={profile}", *options)
    command = headless(*logged, "--dump-dom", page.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@needs_chromium
def test_the_page_works_in_a_browser_in_light_and_dark_on_a_phone(tmp_path: Path) -> None:
    logs = [
        Log(
            make_spec(trial=trial, configuration=Configuration(codec=codec)),
            seconds=(2.0 + trial, 0.5, 0.6, 0.7),
        )
        for trial, codec in enumerate(("none", "float16", "uniform8"))
    ]
    run, file = write_run(tmp_path / "run", logs), tmp_path / "report.html"
    write_report(run, file)
    html = file.read_text(encoding="utf-8")
    code = PROBE.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    probed = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    file.write_text(probed.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    seen = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        option = f"--blink-settings=preferredColorScheme={number}"
        dom, console = browse(file, tmp_path / scheme, option, "--window-size=500,900")
        assert console == ""  # no error, and nothing that the policy of the page refuses
        title = re.search(r"<title>(.*?)</title>", dom)
        assert title is not None
        seen[scheme] = title[1].split("|")
    order, direction, hidden, shown, rows, words, fits, dark = seen["dark"]
    assert [float(each) for each in order.split()] == sorted(
        map(float, order.split()), reverse=True
    )
    assert len(order.split()) == 3 and direction == "descending"
    assert (hidden, shown) == ("none", "table-cell")
    assert (rows, words) == ("1", "1 of 3 rows") and fits == "true"
    assert seen["light"][:-1] == seen["dark"][:-1] and seen["light"][-1] != dark
