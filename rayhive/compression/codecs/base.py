"""Base classes of codecs: sizes and properties, without loading torch or hivemind.

A codec turns one part of a tensor into the bytes that a peer sends. Its class predicts the number
of these bytes and builds the hivemind object that encodes. A new codec is one file with one
subclass and one ``register_lazy`` line; ``tests/contract/test_codec_contract.py`` then tests it.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any, ClassVar

from rayhive.errors import ConfigError, Problem
from rayhive.registry import CODECS

#: Codebook of an 8-bit part: its length as int64 and 256 float32 values.
CODEBOOK_BYTES = 8 + 256 * 4


class Codec:
    """One codec of the registry, with a fixed number of bits per element and of bytes per part.

    A codec of variable size overrides :meth:`bits` and :meth:`part_bytes`.

    Attributes:
        name: Name in the registry and in configurations.
        encoder: Class of the hivemind object that encodes, or another function that returns one, as
            ``package.module:name``; :meth:`build` imports it.
        element_bits: Bits of one element; whole bytes, unless a subclass says otherwise.
        overhead: Bytes of every part besides its elements.
        uses_threshold: Whether it treats tensors differently from a number of elements on.
        exact_size: Whether :meth:`part_bytes` holds for every content, not only on average.
        relative_error: Upper bound of L2 error over L2 norm on normally distributed parts; 0 if
            decoding restores every bit.
        requires: Import name of an optional dependency; None if it needs none.
        block: Elements of a tensor that are encoded together; no cut of a tensor divides them.
        of_gradients: Whether it is for gradients only: too coarse for parameters, and sent in a
            wire type that hivemind does not have.
        keeps: Whether every element is encoded; False if some of them decode to 0.
        uses_top_k: Whether the class takes ``top_k``, the number of elements sent of each chunk.
    """

    name: ClassVar[str]
    encoder: ClassVar[str]
    element_bits: ClassVar[int]
    overhead: ClassVar[int] = 0
    uses_threshold: ClassVar[bool] = False
    exact_size: ClassVar[bool] = True
    relative_error: ClassVar[float]
    requires: ClassVar[str | None] = None
    block: ClassVar[int] = 1
    of_gradients: ClassVar[bool] = False
    keeps: ClassVar[bool] = True
    uses_top_k: ClassVar[bool] = False

    @classmethod
    def available(cls) -> bool:
        """Return whether the optional dependency is installed here."""
        return cls.requires is None or importlib.util.find_spec(cls.requires) is not None

    def build(self, threshold: int | None = None) -> Any:
        """Return the ``hivemind.compression.CompressionBase`` that encodes.

        Args:
            threshold: Elements of a whole tensor; required if and only if ``uses_threshold``, and
                then for a method of the subclass.

        Raises:
            ConfigError: ``threshold`` is missing, unwanted or not positive.
        """
        self.check_threshold(threshold)
        return pkgutil.resolve_name(self.encoder)()

    def bits(self, tensor_elements: int, threshold: int | None = None) -> float:
        """Return the bits per element by which hivemind cuts a tensor into parts.

        It is 32 times ``estimate_compression_ratio``, without the fixed cost of a part.

        Args:
            tensor_elements: Elements of the whole tensor.
            threshold: As for :meth:`build`.
        """
        self.check_threshold(threshold)
        return float(self.element_bits)

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the payload of one part [bytes]: the length of the buffer in its message.

        Args:
            part_elements: Elements of the part.
            tensor_elements: Elements of the whole tensor that it was cut from.
            threshold: As for :meth:`build`.
        """
        self.check_threshold(threshold)
        return part_elements * self.element_bits // 8 + self.overhead

    def check_threshold(self, threshold: int | None) -> None:
        """Refuse a threshold that is missing, unwanted or not positive.

        Raises:
            ConfigError: The threshold is one of these.
        """
        if not self.uses_threshold:
            if threshold is not None:
                raise ConfigError(Problem("threshold", threshold, f"absent with {self.name}"))
        elif threshold is None or threshold < 1:
            allowed = f"a number of elements, at least 1, with {self.name}"
            raise ConfigError(Problem("threshold", threshold, allowed))


def made(name: str, top_k: int | None = None) -> Codec:
    """Return a registered codec.

    Args:
        name: Its name.
        top_k: Number of elements that a sparse codec sends of each chunk; None for its default.

    Raises:
        ConfigError: The name is unknown, or ``top_k`` is unwanted or out of range.
    """
    kind: type[Codec] = CODECS.get(name, "codec")
    if top_k is None:
        return kind()
    if not kind.uses_top_k:
        raise ConfigError(Problem("top_k", top_k, f"absent with {name}"))
    sparse: Any = kind
    found: Codec = sparse(top_k=top_k)
    return found


class BlockCodec(Codec):
    """Codec of a few bits per element, with float32 scales for each block.

    Attributes:
        scales: Number of float32 scales of a block.
    """

    of_gradients = True
    scales: ClassVar[int]

    def bits(self, tensor_elements: int, threshold: int | None = None) -> float:
        """Return the bits per element, with its part of the scales."""
        scales = 32 * self.scales / self.block
        return super().bits(tensor_elements, threshold) + scales

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the bytes of the elements, filled up to whole bytes, and of the scales."""
        self.check_threshold(threshold)
        blocks = -(-part_elements // self.block)
        return -(-part_elements * self.element_bits // 8) + 4 * self.scales * blocks
