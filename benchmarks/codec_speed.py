"""How fast codecs encode and decode, against hivemind's own and a plain copy in the same run.

Claims, for 10 million floats on one core, encoding and decoding together:

* ``uniform8`` takes at most half the time of hivemind's class;
* ``float16`` takes no more than hivemind's class, and at most 3 times as long as copying the
  same floats once in each direction;
* every codec sends as many bytes as hivemind's, with the same or a lower error, and each side
  decodes what the other encoded.

The floats are cut as a round cuts them: 512 KiB after compression, one part after another. The
variants take turns, part by part. Times are the process's CPU time, all threads together,
which is the time on one core of a machine that does nothing else. A claim of a ratio holds if the
whole of its 95 % interval does.

With ``--device cuda`` the floats lie on the GPU, as gradients do: every variant fetches a part
from there before it encodes, and puts there what it decoded. Times are the clock's then.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hivemind import compression as theirs
from hivemind.averaging.partition import DEFAULT_PART_SIZE_BYTES
from hivemind.compression import serialization
from hivemind.proto.runtime_pb2 import CompressionType

sys.path.insert(0, __file__.rsplit("/", 2)[0])

import rayhive.compression  # noqa: F401 - registers the codecs
from benchmarks.ratios import claim, conditions, paired_ratio
from rayhive.compression import wire
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
#: Who receives a part decodes it by such a table; see rayhive.compression.wire.install.
TABLES = {
    "rayhive": serialization._BASE_COMPRESSION_TYPES | wire.table(),
    "hivemind": serialization._BASE_COMPRESSION_TYPES,
}
VARIANTS = ("rayhive", "hivemind", "copy")


class Pair:
    """A codec of ours and hivemind's, over the same parts of the same floats."""

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

    def run(self, turn: int) -> dict[str, np.ndarray]:
        """Return the seconds that each variant spends on encoding and decoding every part."""
        seconds = {variant: np.zeros(2) for variant in VARIANTS}
        for index, part in enumerate(self.parts):
            first = (turn + index) % len(VARIANTS)
            for variant in VARIANTS[first:] + VARIANTS[:first]:
                began = self.clock()
                message = self._encode(variant, part)
                encoded = self.clock()
                self._decode(variant, message)
                seconds[variant] += encoded - began, self.clock() - encoded
        return seconds

    def sent(self, variant: str) -> tuple[int, float]:
        """Return the bytes of all parts, and what was lost: L2 error over L2 norm."""
        sent, missed, norm = 0, 0.0, 0.0
        for part in self.parts:
            message = self._encode(variant, part)
            sent += len(message.buffer)
            missed += float((self._decode(variant, message) - part).double().square().sum())
            norm += float(part.double().square().sum())
        return sent, (missed / norm) ** 0.5

    def understood(self) -> bool:
        """Say whether each side decodes the other's parts to what the sender would."""
        for sender, receiver in (VARIANTS[:2], VARIANTS[1::-1]):
            for part in (self.parts[0], self.parts[-1]):
                message = self._encode(sender, part)
                if not torch.equal(self._decode(receiver, message), self._decode(sender, message)):
                    return False
        return True

    def _encode(self, variant: str, part: torch.Tensor) -> Any:
        host = part.cpu()
        if variant == "copy":
            return host.clone()
        return self.codecs[variant].compress(host, self.info)

    def _decode(self, variant: str, message: Any) -> torch.Tensor:
        if variant == "copy":
            host = message.clone()
        else:
            host = TABLES[variant][CompressionType.Name(message.compression)].extract(message)
        got = host.to(self.device)
        if got.is_cuda:
            torch.cuda.synchronize()
        return got


def measure(name: str, floats: torch.Tensor, repeats: int) -> bool:
    """Measure one codec, print its lines, and return whether its claims hold."""
    pair = Pair(name, floats)
    (sent, error), (their_bytes, their_error) = (pair.sent(variant) for variant in VARIANTS[:2])
    runs = [pair.run(turn) for turn in range(repeats)]
    both = {variant: [run[variant].sum() for run in runs] for variant in VARIANTS}
    gain = paired_ratio(both["hivemind"], both["rayhive"])
    cost = paired_ratio(both["rayhive"], both["copy"])
    print(f"{name}: {len(pair.parts)} parts, {sent:,} bytes, error {error:.3g}")
    for variant in VARIANTS:
        encode, decode = np.median([run[variant] for run in runs], axis=0) * 1e3
        print(f"  {variant:>8}: encode {encode:6.1f} ms, decode {decode:6.1f} ms")
    print(f"  hivemind/rayhive {gain}, rayhive/copy {cost}")
    same = sent == their_bytes and error <= their_error * (1 + 1e-5) and pair.understood()
    held = [claim(f"{name}: hivemind's bytes, its error or less, each decodes the other", same)]
    if name == "uniform8":
        held.append(claim("uniform8: at least 2 times hivemind's speed", gain.low >= 2))
    if name == "float16":
        held.append(claim("float16: no slower than hivemind's", gain.low >= 1))
        held.append(claim("float16: within 3 times of copying both ways", cost.high <= 3))
    return all(held)


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
        print("skipped: no GPU here")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's quantiser, which hivemind uses, is deprecated
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(arguments.elements, generator=generator).to(arguments.device)
    print(
        f"{arguments.elements:,} floats on {arguments.device}, one core, "
        f"{arguments.repeats} repeats, {conditions()}"
    )
    held = True
    for name in arguments.codecs:
        if CODECS.get(name).available():
            held &= measure(name, floats, arguments.repeats)
        else:
            print(f"{name}: skipped, {CODECS.get(name).requires} is not installed")
    if arguments.check and not held:
        sys.exit(1)


if __name__ == "__main__":
    main()
