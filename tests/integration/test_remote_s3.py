"""A run folder on S3, against a local server that speaks its protocol: moto, where it is installed.

It needs s3fs and the command ``moto_server``, which are no dependencies of the tests.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rayhive import api
from rayhive.errors import ConfigError
from rayhive.remote import COPIES_VARIABLE
from tests.integration.cluster_harness import ROOT, eventually, free_port

MOTO = shutil.which("moto_server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed"),
    pytest.mark.skipif(MOTO is None, reason="moto_server is not installed"),
]


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the server with an empty bucket, and point the process at it."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (tmp_path / "moto.log").open("w") as log:
        server = subprocess.Popen(
            [str(MOTO), "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=clean,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        COPIES_VARIABLE: str(tmp_path / "first"),
    }.items():
        monkeypatch.setenv(name, value)

    def made() -> bool:
        request = urllib.request.Request(f"{url}/runs", method="PUT")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request):
                return True
        except urllib.error.URLError:
            return False

    try:
        eventually(made, 60.0)
        yield url
    finally:
        os.killpg(server.pid, 15)
        server.wait()


@pytest.mark.cluster
def test_a_sweep_to_s3_is_resumed_on_another_machine(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sessions run real peers; the second has more replicates, and runs only those."""
    study = {
        "name": "stored",
        "workload": {"name": "digits"},
        "budget": {"trials": 1, "seconds_per_replicate": 60, "samples_per_replicate": 1024},
        "replicates": 1,
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))

    def sweep(*options: str) -> str:
        command = [sys.executable, "-m", "rayhive", "sweep", str(tmp_path / "study.yaml")]
        command += ["--out", "s3://runs/stored", "--format", "csv", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "this run is kept in s3://runs/stored" in done.stderr
        return done.stdout

    sweep()
    first = api.load("s3://runs/stored")
    log = first.folder / "trials" / "0" / "r0-none" / "events.jsonl"
    text = log.read_bytes()

    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / "second"))
    sweep("--set", "replicates=2")
    both = api.load("s3://runs/stored")
    assert list(both.configurations["n"]) == [2]
    assert (both.folder / log.relative_to(first.folder)).read_bytes() == text
    assert both.folder != first.folder


def test_a_bucket_that_is_not_there_is_refused(endpoint: str) -> None:
    study = {"name": "stored", "workload": {"name": "digits"}}
    with pytest.raises(ConfigError, match=r"--out: 's3://nowhere/run' .* a URL that can be"):
        api.sweep(study, out="s3://nowhere/run", progress=False)
