"""Keys of configurations: equal where configurations have the same effect on a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayhive.compression.codecs.base import Codec
from rayhive.compression.codecs.size_adaptive import SizeAdaptive
from rayhive.compression.payload import configuration_payload
from rayhive.compression.powersgd.shapes import Shape
from rayhive.registry import CODECS
from rayhive.spec import AXES, Configuration

#: Axes whose effect depends on shapes; the key has the values of all other axes.
_OF_SHAPES = ("codec", "threshold", "powersgd_rank", "min_compression_ratio")


def configuration_key(shapes: Iterable[Shape], configuration: Configuration) -> str:
    """Return a key of the effect that a configuration has on gradients of these shapes.

    Configurations with equal keys send the same bytes and compute the same. A threshold counts by
    the tensors that it makes large. A ratio counts by the tensors that PowerSGD factorises: for one
    rank these sets are nested, so their number identifies them. A rank that factorises nothing
    does not count, nor do axes that depend on a rank.

    Args:
        shapes: Shape of every gradient.
        configuration: A configuration; defaults are filled in.

    Raises:
        ConfigError: As :func:`rayhive.compression.payload.payload`.
    """
    values = configuration.values
    predicted = configuration_payload(shapes, configuration)
    sizes = [size for phase in predicted.phases for size in phase.elements]
    count = len(predicted.compressed)
    if not count:
        values["powersgd_rank"] = None
    return "; ".join(
        [
            f"codec {_codec_key(values['codec'], values['threshold'], sizes)}",
            f"powersgd rank {values['powersgd_rank']} on {count}" if count else "powersgd none",
            *(
                f"{axis.name} {values[axis.name]}"
                for axis in AXES
                if axis.name not in _OF_SHAPES and axis.applies(values)
            ),
        ]
    )


def _codec_key(name: str, threshold: int | None, sizes: Sequence[int]) -> str:
    """Return a key of a codec's effect on tensors of these sizes."""
    codec: Codec = CODECS.get(name, "codec")()
    codec.check_threshold(threshold)
    if threshold is None:
        return codec.name
    large = [size for size in sizes if size >= threshold]
    if isinstance(codec, SizeAdaptive) and len(large) in (0, len(sizes)):
        return codec.large.name if large else codec.small.name
    return f"{codec.name} from {min(large)} elements" if large else f"{codec.name} on nothing"
