"""Decoders of the wire types that hivemind does not have, by number."""

from __future__ import annotations

from rayhive.compression.kernels.low_bit import FourBit, OneBit, TwoBit
from rayhive.compression.kernels.packed import PackedCodec
from rayhive.compression.kernels.sparse import TopK

DECODERS: dict[int, PackedCodec] = {
    each.compression_type: each for each in (FourBit(), TwoBit(), OneBit(), TopK())
}
