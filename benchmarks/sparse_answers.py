"""Answers of a reducer with top-k: sparse with a memory, sparse without one, or the exact average.

Claim, for noisy gradients of 16 chunks of 4096 elements, and 2 to 8 peers of unequal batches: with
four times the density and a memory, sparse answers come at least as close to the target as the
exact average does, with at most 0.7 times the bytes of both directions.

The updates are those of the papers' equations, in float64; the bytes are those of ``topk``, and
for the exact average the shorter of its non-zero elements with Elias and Fano's indices, and of
float32 for all. No peer's own part is exact here, so that the answers alone differ.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.runs import ratio_of_runs
from rayhive.compression.codecs.topk import index_bits, segment_bytes
from rayhive.spec.axes.top_k import CHUNK
from tests.paper.codec_oracles import Array, in_blocks, two_means

CHUNKS, RATE = 16, 0.2
#: Ways to answer, and the factor of the density.
WAYS = (("exact", 1), ("memory", 1), ("forgets", 1), ("memory", 4))


def top(k: int) -> object:
    """Return the compressor of a chunk's largest elements."""

    def compress(p: Array) -> Array:
        largest = np.argpartition(-np.abs(p), k)[:k]
        found = np.zeros_like(p)
        found[largest] = two_means(p[largest])
        return found

    return in_blocks(CHUNK, compress)


def exact_bytes(average: Array) -> int:
    """Return the bytes of an average whose non-zero elements are sent in float32."""
    total = 0
    for chunk in average.reshape(-1, CHUNK):
        count = int(np.count_nonzero(chunk))
        total += min(4 * CHUNK, 4 * count + -(-index_bits(CHUNK, count) // 8)) if count else 0
    return total


def train(way: str, peers: int, top_k: int, rounds: int, seed: int) -> tuple[float, float]:
    """Return the distance to the target over the initial one, and the bytes there and back."""
    random, compress = np.random.default_rng(seed), top(top_k)
    size = CHUNKS * CHUNK
    scales = 10 ** random.uniform(-0.5, 0.5, size)
    targets = [scales * random.normal(size=size) for _ in range(peers)]
    weights = [float(random.integers(1, 33)) for _ in range(peers)]
    target = sum(w * t for w, t in zip(weights, targets, strict=True)) / sum(weights)
    x, memory = np.zeros(size), np.zeros(size)
    sums, sent_bytes = [np.zeros(size) for _ in range(peers)], 0
    for number in range(rounds):
        sent = []
        for at, weight in enumerate(weights):
            noise = 0.1 * scales * random.normal(size=size) / weight**0.5
            p = x - targets[at] + noise + sums[at] / weight
            sent.append(compress(p))  # type: ignore[operator]
            sums[at] = weight * (p - sent[-1])
        average = sum(w * each for w, each in zip(weights, sent, strict=True)) / sum(weights)
        if way == "exact":
            update, back = average, exact_bytes(average)
        else:
            update = compress(average + memory)  # type: ignore[operator]
            back = segment_bytes(size, top_k)
            memory = average + memory - update if way == "memory" else memory
        sent_bytes += segment_bytes(size, top_k) + back
        x = x - RATE * 0.995**number * update
    return float(np.linalg.norm(x - target) / np.linalg.norm(target)), sent_bytes / rounds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--top-k", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for peers in (2, 4, 8):
        rows = {}
        for way, factor in WAYS:
            top_k = factor * given.top_k
            runs = [train(way, peers, top_k, given.rounds, seed) for seed in range(given.seeds)]
            rows[way, factor] = np.array(runs)
            distance, sent = np.mean(runs, 0)
            print(f"{peers} peers, {way}, top_k {top_k}: {distance:.4f}, {sent:,.0f} bytes")
        for at, text, bound in ((0, "distance", 1.0), (1, "bytes", 0.7)):
            pair = rows["memory", 4][:, at].tolist(), rows["exact", 1][:, at].tolist()
            text = f"{peers} peers, {text}: sparse answers of 4 times the density over exact ones"
            print_claims(Claim(text, *ratio_of_runs(*pair), "x", bound, at_least=False))


if __name__ == "__main__":
    main()
