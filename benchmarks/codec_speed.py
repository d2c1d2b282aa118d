"""Speed of codecs, compared with hivemind's codecs and with a plain copy in the same run.

Claims, for 10 million floats on one core, encoding and decoding together:

* ``uniform8`` takes at most half the time of hivemind's class;
* ``float16`` takes no more than hivemind's class, and at most 3 times as long as copying the
  same floats in each direction, into allocated memory;
* every codec sends as many bytes as hivemind's, with the same or a lower error, and each side
  decodes the messages of the other.

The floats are split as in a round: into parts of 512 KiB after compression, one after another. The
variants take turns, each in a process of its own, because a peer runs only one of them: memory
that one variant has freed must not be available to another. Times are CPU times of all threads of
the process together, which is the time on one core of an idle machine.

With ``--device cuda`` the floats are on the GPU, as gradients are: every variant copies a part from
there before it encodes, and copies the decoded part back. Times are wall times then.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from hivemind import compression as theirs
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.proto.runtime_pb2 import CompressionType

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims, print_fact
from benchmarks.ratios import paired_ratio
from benchmarks.swarm import conditions
from rayhive.compression.kernels import install
from rayhive.registry import CODECS

#: Elements from which ``size_adaptive`` uses eight bits.
THRESHOLD = 2**16
HIVEMINDS: dict[str, Callable[[], theirs.CompressionBase]] = {
    "none": theirs.NoCompression,
    "float16": theirs.Float16Compression,
    "scaled_float16": theirs.ScaledFloat16Compression,
    "uniform8": theirs.Uniform8BitQuantization,
    "quantile8": theirs.Quantile8BitQuantization,
    "blockwise8": theirs.BlockwiseQuantization,
    "size_adaptive": lambda: theirs.SizeAdaptiveCompression(
        THRESHOLD, theirs.Float16Compression(), theirs.Uniform8BitQuantization()
    ),
}
#: Codecs by which a receiver decodes a part; see rayhive.compression.kernels.install.install.
TABLES = {
    "rayhive": install.KNOWN | install.table(),
    "hivemind": install.KNOWN,
}
VARIANTS = ("rayhive", "hivemind", "copy")


_floats: torch.Tensor  # data of a worker process


class Pair:
    """Codec of rayhive and the same of hivemind, for the same parts of the same floats."""

    def __init__(self, name: str, floats: torch.Tensor) -> None:
        codec = CODECS.get(name)()
        self.codecs: dict[str, theirs.CompressionBase] = {
            "rayhive": codec.build(THRESHOLD if codec.uses_threshold else None),
            "hivemind": HIVEMINDS[name](),
        }
        self.info = theirs.CompressionInfo.from_tensor(floats)
        bits = 32 * self.codecs["hivemind"].estimate_compression_ratio(self.info)
        self.parts = floats.split(int(DEFAULT_PART_SIZE_BYTES / (bits / 8)))
        self.device = floats.device
        self.clock = time.perf_counter if floats.is_cuda else time.process_time
        self.memory = torch.empty(2, len(self.parts[0]))

    def run(self, variant: str) -> tuple[float, float]:
        """Return the seconds in which a variant encodes and decodes all parts."""
        encode = decode = 0.0
        for part in self.parts:
            began = self.clock()
            message = self._encode(variant, part)
            encoded = self.clock()
            self._decode(variant, message)
            encode, decode = encode + encoded - began, decode + self.clock() - encoded
        return encode, decode

    def sent(self, variant: str) -> tuple[int, float]:
        """Return the bytes of all parts, and the relative error: L2 error / L2 norm."""
        sent, missed, norm = 0, 0.0, 0.0
        for part in self.parts:
            message = self._encode(variant, part)
            sent += len(message.buffer)
            missed += float((self._decode(variant, message) - part).double().square().sum())
            norm += float(part.double().square().sum())
        return sent, (missed / norm) ** 0.5

    def understood(self) -> bool:
        """Return whether sender and receiver of different variants decode to equal values."""
        for sender, receiver in (VARIANTS[:2], VARIANTS[1::-1]):
            for part in (self.parts[0], self.parts[-1]):
                message = self._encode(sender, part)
                if not torch.equal(self._decode(receiver, message), self._decode(sender, message)):
                    return False
        return True

    def _encode(self, variant: str, part: torch.Tensor) -> Any:
        host = part.cpu()
        if variant == "copy":
            return self.memory[0, : len(host)].copy_(host)
        return self.codecs[variant].compress(host, self.info)

    def _decode(self, variant: str, message: Any) -> torch.Tensor:
        if variant == "copy":
            host = self.memory[1, : len(message)].copy_(message)
        else:
            host = TABLES[variant][CompressionType.Name(message.compression)].extract(message)
        got = host.to(self.device)
        if got.is_cuda:
            torch.cuda.synchronize()
        return got


def make_floats(elements: int, device: str) -> torch.Tensor:
    """Return normally distributed floats from a fixed seed."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device)


def worker(elements: int, device: str) -> ProcessPoolExecutor:
    """Return a new process for one variant."""
    return ProcessPoolExecutor(
        max_workers=1,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(elements, device),
    )


def _start(elements: int, device: str) -> None:
    _quiet()
    global _floats
    _floats = make_floats(elements, device)


def _run(name: str, variant: str) -> tuple[float, float]:
    return Pair(name, _floats).run(variant)


def _quiet() -> None:
    """Compute in one thread, without the warnings of torch's quantiser, which hivemind uses."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def measure(
    name: str, floats: torch.Tensor, repeats: int, workers: dict[str, ProcessPoolExecutor]
) -> bool:
    """Measure one codec, print its lines, and return whether its claims hold."""
    pair = Pair(name, floats)
    (sent, error), (their_bytes, their_error) = (pair.sent(variant) for variant in VARIANTS[:2])
    runs: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for turn in range(1 + repeats):  # the first one is for warming up
        for variant in VARIANTS if turn % 2 else VARIANTS[::-1]:
            runs[variant].append(workers[variant].submit(_run, name, variant).result())
    seconds = {variant: np.array(runs[variant][1:]) for variant in VARIANTS}
    both = {variant: values.sum(axis=1) for variant, values in seconds.items()}
    gain = paired_ratio(both["hivemind"], both["rayhive"])
    cost = paired_ratio(both["rayhive"], both["copy"])
    print(f"{name}: {len(pair.parts)} parts, {sent:,} bytes, error {error:.3g}")
    for variant in VARIANTS:
        encode, decode = np.median(seconds[variant], axis=0) * 1e3
        print(f"  {variant:>8}: encode {encode:6.1f} ms, decode {decode:6.1f} ms")
    print(f"  hivemind over rayhive {gain}, rayhive over copy {cost}")
    same = sent == their_bytes and error <= their_error * (1 + 1e-5) and pair.understood()
    print_fact(f"{name}: hivemind's bytes, its error or less, each decodes the other", same)
    text = f"{name}: hivemind's time over rayhive's"
    claims = []
    if name == "uniform8":
        claims.append(Claim(text, *gain, unit="x", bound=2.0, at_least=True))
    if name == "float16":
        claims.append(Claim(text, *gain, unit="x", bound=1.0, at_least=True))
        text = "float16: rayhive's time over copying both ways"
        claims.append(Claim(text, *cost, unit="x", bound=3.0, at_least=False))
    print_claims(*claims)
    return same and all(claim.held for claim in claims)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--codecs", nargs="+", default=list(HIVEMINDS), choices=list(HIVEMINDS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--check", action="store_true", help="exit 1 unless every claim holds")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return
    _quiet()
    floats = make_floats(arguments.elements, arguments.device)
    print(
        f"{arguments.elements:,} floats on {arguments.device}, one core, "
        f"{arguments.repeats} repeats, {conditions()}"
    )
    held = True
    with ExitStack() as stack:
        size = (arguments.elements, arguments.device)
        workers = {variant: stack.enter_context(worker(*size)) for variant in VARIANTS}
        for name in arguments.codecs:
            if CODECS.get(name).available():
                held &= measure(name, floats, arguments.repeats, workers)
            else:
                print(f"{name}: skipped, {CODECS.get(name).requires} is not installed")
    if arguments.check and not held:
        sys.exit(1)


if __name__ == "__main__":
    main()
