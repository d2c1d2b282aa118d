"""Bits per element and relative error of every codec, for noise and for gradients.

Claims, for each codec: the error (L2 error over L2 norm) of normally distributed values is at most
the bound that the codec states. Gradients are means over 20 batches of the workloads ``digits`` and
``source_lm``, after as many steps.

The row ``topk, DCT`` has a transform before ``topk``: the discrete cosine transform of
chunks of 64 by 64 elements of each matrix, as in DeMo (arXiv 2411.19870).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys

import numpy as np
import torch
from hivemind.compression import CompressionInfo

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from rayhive.averaging.parts import decode
from rayhive.compression.powersgd.shapes import matrix_dims
from rayhive.registry import CODECS
from rayhive.workloads.loading import load_workload

BATCHES, SIDE = 20, 64
SMALL_LM = {"width": 128, "heads": 4}


def gradients_of(name: str, args: dict[str, int]) -> list[torch.Tensor]:
    """Return the mean gradients over some batches, after some steps of training."""
    workload = load_workload(name, None, args)
    module = workload.module(0)
    loader = workload.train_loader(peer=0, peers=1, batch_size=32, seed=0)
    optimizer = module.configure_optimizers()
    parameters = list(module.parameters())
    total = [torch.zeros_like(each) for each in parameters]
    for number, batch in enumerate(itertools.islice(loader, 2 * BATCHES)):
        optimizer.zero_grad()  # type: ignore[union-attr]
        module.training_step(batch, number).backward()  # type: ignore[union-attr]
        if number < BATCHES:
            optimizer.step()  # type: ignore[union-attr]
        else:
            for gradient, each in zip(total, parameters, strict=True):
                gradient += each.grad / BATCHES
    return total


def basis(size: int) -> torch.Tensor:
    """Return the orthonormal basis of the discrete cosine transform (type 2), row by row."""
    k, n = np.mgrid[:size, :size]
    rows = np.cos(math.pi / size * (n + 0.5) * k) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return torch.from_numpy(rows).float()


def transformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of a tensor's chunks, each chunk in one piece."""
    rows, columns = matrix_dims(tuple(tensor.shape)) if tensor.ndim > 1 else (1, tensor.numel())
    height, width = (
        max(side for side in range(1, SIDE + 1) if not size % side) for size in (rows, columns)
    )
    chunks = tensor.reshape(rows // height, height, columns // width, width).transpose(1, 2)
    return (basis(height) @ chunks @ basis(width).T).reshape(-1)


def error(name: str, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the bits per element of a codec, and its relative error."""
    codec = CODECS.get(name)()
    built = codec.build(2**16 if codec.uses_threshold else None)
    bits = missed = norm = 0.0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        message = built.compress(flat, CompressionInfo.from_tensor(flat))
        bits += 8 * len(message.buffer)
        missed += float((decode(message) - flat).double().square().sum())
        norm += float(flat.double().square().sum())
    return bits / sum(tensor.numel() for tensor in tensors), (missed / norm) ** 0.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**18)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(torch.tensor(3.0))
    sources = {
        "normal": [torch.randn(given.elements)],
        "Student's t, 3 degrees": [heavy.sample((given.elements,))],
        "digits": gradients_of("digits", {}),
        "source_lm": gradients_of("source_lm", SMALL_LM),
    }
    print(f"{'codec':16}" + "".join(f"{name:>26}" for name in sources))
    claims = []
    for name in (name for name in CODECS.names() if CODECS.get(name).available()):
        found = [error(name, tensors) for tensors in sources.values()]
        print(f"{name:16}" + "".join(f"{bits:14.3f} b {wrong:8.4f} " for bits, wrong in found))
        wrong, bound = found[0][1], CODECS.get(name).relative_error
        claims.append(Claim(f"{name}: error", wrong, wrong, wrong, "", bound, at_least=False))
    in_dct = [error("topk", list(map(transformed, tensors))) for tensors in sources.values()]
    print(f"{'topk, DCT':16}" + "".join(f"{bits:14.3f} b {wrong:8.4f} " for bits, wrong in in_dct))
    print_claims(*claims)


if __name__ == "__main__":
    main()
