"""Start of a peer's fit, from its spec."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from rayhive.peer.from_spec import PeerFit
from rayhive.spec.replicate import PeerSpec

SOURCE = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from rayhive.workloads.base import Workload


class AgainInSetup(BoringModel):
    def setup(self, stage):
        self.layer = torch.nn.Linear(32, 2)


class Late(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = None

    def setup(self, stage):
        self.first = torch.nn.Linear(32, 2)

    def configure_model(self):
        self.second = torch.nn.Linear(32, 2)


class LateLayers(Workload):
    name, default_batch_size, target, data = "late", 2, None, "own"

    def module(self, seed):
        return Late()

    def train_loader(self, **given):
        return DataLoader(RandomDataset(32, 8), batch_size=2)

    def evaluate(self, module, device=None):
        return {"loss": 0.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, as a user has it beside the study."""
    (tmp_path / "late.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("late", None)


def start_of(path: str, peer: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return the parameters with which a peer starts."""
    spec = PeerSpec.model_validate(
        {
            "run_id": "start",
            "peer": peer,
            "peers": 2,
            "seed": seed,
            "workload": {"import": path},
            "swarm": {"peers": 2},
            "configuration": {},
        }
    )
    threads = torch.get_num_threads()
    fit = PeerFit(spec)
    torch.set_num_threads(threads)
    torch.manual_seed(peer)
    fit.run(fit.make_trainer("auto", Callback(), max_steps=0))
    return fit.module.state_dict()


@pytest.mark.parametrize("path", ["late:AgainInSetup", "late:LateLayers"])
def test_layers_that_setup_makes_are_equal_on_all_peers(path: str) -> None:
    one, two, other = start_of(path, 0), start_of(path, 1), start_of(path, 1, seed=4)
    for name, values in one.items():
        assert torch.equal(values, two[name])
        assert not torch.equal(values, other[name])
