"""The windows of convolutions and pools: their attributes, checked, and the sizes that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from service.errors import InvalidParameter, ShapeMismatch

AutoPad = Literal["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]

LARGEST = 1 << 31
"""The largest number of an attribute."""


@dataclass(frozen=True)
class Windows:
    """Windows over an input with these `sizes` along its spatial axes. Each tuple has a number for each axis.

    Tap t of window w lies at w * stride + t * dilation - begin, which may be in the padding.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """The elements from the first tap of a window to its last one."""
        return tuple((k - 1) * dilation + 1 for k, dilation in zip(self.kernel, self.dilations, strict=True))

    @property
    def rooms(self) -> tuple[int, ...]:
        """How far the padded input reaches beyond the first window."""
        axes = zip(self.sizes, self.begins, self.ends, self.spans, strict=True)
        return tuple(size + begin + end - span for size, begin, end, span in axes)

    @property
    def counts(self) -> tuple[int, ...]:
        """The windows that fit into the padded input."""
        return tuple(room // stride + 1 for room, stride in zip(self.rooms, self.strides, strict=True))

    def taps(self, axis: int) -> list[int]:
        """Return where the taps of the first window lie."""
        return [tap * self.dilations[axis] - self.begins[axis] for tap in range(self.kernel[axis])]

    def check_fit(self, tensor: str) -> None:
        """Raise `ShapeMismatch` unless a window fits into the padded `tensor`."""
        for axis, (room, span) in enumerate(zip(self.rooms, self.spans, strict=True)):
            if room < 0:
                padded = f"{room + span} elements, padding included"
                problem = f"{tensor} has {padded}, along axis {axis + 2}, but a window takes {span}"
                raise ShapeMismatch(problem, tensor=tensor)


def make_windows(
    sizes: tuple[int, ...],
    kernel: Sequence[int],
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    auto_pad: str = "NOTSET",
) -> Windows:
    """Return the windows over an input with these spatial axes. Raises `InvalidParameter`.

    Unless `auto_pad` is NOTSET, it sets the padding, as in ONNX Runtime's forward operators.
    """
    rank = len(sizes)
    padding = numbers("pads", 2 * rank, pads, default=0, least=0)
    windows = Windows(
        sizes,
        numbers("kernel_shape", rank, kernel),
        numbers("strides", rank, strides),
        numbers("dilations", rank, dilations),
        padding[:rank],
        padding[rank:],
    )
    if auto_pad == "NOTSET":
        return windows
    windows = replace(windows, begins=(0,) * rank, ends=(0,) * rank)
    return windows if auto_pad == "VALID" else same(windows, windows.spans, auto_pad)


def same(windows: Windows, spans: tuple[int, ...], auto_pad: str) -> Windows:
    """Return windows padded so that ceil(size / stride) windows with these spans fit.

    The padding may be negative: if the windows leave gaps between them, the first may begin beyond the first element.
    """
    totals = [
        (-(-size // stride) - 1) * stride + span - size
        for size, stride, span in zip(windows.sizes, windows.strides, spans, strict=True)
    ]
    return padded(windows, totals, auto_pad)


def padded(windows: Windows, totals: Sequence[int], auto_pad: str) -> Windows:
    """Return the windows with half of each total of padding before the axis; SAME_UPPER leaves an odd one behind it."""
    begins = tuple(int((total + (auto_pad != "SAME_UPPER")) / 2) for total in totals)
    return replace(windows, begins=begins, ends=tuple(t - b for t, b in zip(totals, begins, strict=True)))


def numbers(
    name: str, length: int, values: Sequence[int] | None, *, default: int = 1, least: int = 1
) -> tuple[int, ...]:
    """Return the numbers of the attribute `name`, by default all `default`. Raises `InvalidParameter`."""
    if values is None:
        return (default,) * length
    if len(values) != length:
        problem = f"{name} has the length {len(values)}, but must have {length}, as the spatial axes demand"
        raise InvalidParameter(problem, parameter=name)
    for place, value in enumerate(values):
        if not least <= value <= LARGEST:
            problem = f"{name}[{place}] is {value}, but must be in [{least}, {LARGEST}]"
            raise InvalidParameter(problem, parameter=name)
    return tuple(values)


Phase = tuple[tuple[Any, ...], list[tuple[int, tuple[int, ...]]]]
"""The pixels of a phase, and the taps that see them: each has its number, and by how many windows it is shifted."""


def find_phases(windows: Windows) -> list[Phase]:
    """Return the phases, each of every stride-th pixel, that the windows see."""
    phases: dict[tuple[int, ...], Phase] = {}
    for number, places in enumerate(itertools.product(*map(windows.taps, range(len(windows.sizes))))):
        splits = [divmod(place, stride) for place, stride in zip(places, windows.strides, strict=True)]
        first = tuple(start for _, start in splits)
        pixels = (..., *(slice(start, None, stride) for start, stride in zip(first, windows.strides, strict=True)))
        phases.setdefault(first, (pixels, []))[1].append((number, tuple(shift for shift, _ in splits)))
    return list(phases.values())
