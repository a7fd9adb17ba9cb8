"""Rows of a snapshot that stand for all buffers with the same prefix, up to the next dot in their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve_client._output import late_text, size
from gradserve_client.models import BufferInfo

GROUP_COLUMNS = ["prefix", "buffers", "size", "epoch", "count", "weight", "norm", "adds/s"]
"""The columns of `Group.cells`, before those of deadlines."""


def group_of(name: str, prefix: str) -> str:
    """Return the prefix of a buffer's group: its name up to the first dot behind `prefix`, or its whole name.

    >>> group_of("net.layers.0.weight", ""), group_of("net.layers.0.weight", "net."), group_of("net.bias", "net.")
    ('net.', 'net.layers.', 'net.bias')
    """
    end = name.find(".", len(prefix))
    return name if end < 0 else name[: end + 1]


@dataclass(frozen=True)
class Group:
    """The buffers of a group in a snapshot."""

    prefix: str
    infos: Sequence[BufferInfo]
    norm: float | None
    """The Euclidean norm of all sums together, if it is wanted."""
    rate: float | None
    """Adds per second to all buffers."""

    @classmethod
    def of(cls, prefix: str, rows: Sequence[Any]) -> Group:
        """Return the group of these rows."""
        norms, rates = [row.norm for row in rows], [row.rate for row in rows if row.rate is not None]
        norm = None if None in norms else math.hypot(*norms)
        return cls(prefix, [row.info for row in rows], norm, sum(rates) if rates else None)

    @property
    def missing(self) -> list[str]:
        """Who is missing in any of the buffers."""
        return [*dict.fromkeys(name for info in self.infos for name in info.missing or ())]

    def cells(self) -> list[str]:
        """Return the cells of a table's row."""
        quorums = {info.quorum for info in self.infos}
        of = f" of {_range(quorums)}" if None not in quorums else ""
        deadlines = [info.deadline_at for info in self.infos if info.deadline_at is not None]
        return [
            *(self.prefix, str(len(self.infos)), size(sum(info.bytes for info in self.infos))),
            *(_range(info.epoch for info in self.infos), _range(info.count for info in self.infos) + of),
            _range(info.weight for info in self.infos),
            *("" if self.norm is None else f"{self.norm:.4g}", "" if self.rate is None else f"{self.rate:.3g}"),
            *late_text(min(deadlines, default=None), self.missing),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the group for programs: of numbers that differ, the least and the greatest."""
        ranges = {
            name: [min(values), max(values)]
            for name in ("epoch", "count", "weight")
            for values in [[getattr(info, name) for info in self.infos]]
        }
        size = sum(info.bytes for info in self.infos)
        rest = {"norm": self.norm, "adds_per_second": self.rate, "missing": self.missing}
        return {"prefix": self.prefix, "buffers": len(self.infos), "bytes": size, **ranges, **rest}


def _range(numbers: Iterable[Any]) -> str:
    values = [*numbers]
    least, most = min(values), max(values)
    return f"{least:g}" if least == most else f"{least:g}-{most:g}"
