"""Fingerprints and digests do not depend on the device, and copy no tensors to the host."""

from __future__ import annotations

import pytest
import torch

from rayhive.averaging.fingerprint import ROW, fingerprint
from rayhive.averaging.tensor_summary import Digest

pytestmark = pytest.mark.gpu


def test_a_gpu_finds_the_fingerprint_of_the_host() -> None:
    tensors = [torch.randn(300 * ROW + 7), torch.randn(5, 3).bfloat16(), torch.randn(64)]
    assert fingerprint([tensor.cuda() for tensor in tensors]) == fingerprint(tensors)


def test_digests_of_a_gpu_and_of_the_host_are_close() -> None:
    tensors = [torch.randn(3 * ROW + 7), torch.randn(64)]
    found = Digest.of([tensor.cuda() for tensor in tensors])
    assert found.distance(Digest.of(tensors)) < 1e-6
