"""The requests and answers of the statistics of buffers."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypeAlias

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from service.api.buffers.models import PrefixQuery
from service.buffers.steps import ClosedBy

MAX_CELLS = 256
"""Rows and columns of a heat map: its JSON has up to 1.3 MB."""

HISTOGRAM = "Elements by magnitude: counts[i] of them are from bounds[i - 1] up to, but without, bounds[i]."


_Closed: TypeAlias = Annotated[
    bool, Field(description="The last closed step; the running sum if the buffer keeps none.")
]


class ManyStatisticsQuery(PrefixQuery):
    """The buffers whose statistics are wanted: running, or closed."""

    closed: _Closed = False


class StatisticsQuery(BaseModel):
    """What is computed of a buffer."""

    step: int | None = Field(None, ge=0, description="A closed step; by default the running sum.")
    closed: _Closed = False
    since: int = Field(0, ge=0, description="Closed steps from this one on are in `steps`.")
    heat_map: int | None = Field(None, ge=1, le=MAX_CELLS, description="Rows and columns of a heat map, at most.")


class Statistics(TypedDict):
    """The statistics of a sum. Extremes, mean and norm are of its finite elements, and null if it has none."""

    step: int
    version: Annotated[int, Field(description="The state of the buffer that was computed.")]
    count: Annotated[int, Field(description="The number of gradients in the sum.")]
    weight: float
    size: Annotated[int, Field(description="The number of elements.")]
    nan: int
    infinite: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    norm: Annotated[float | None, Field(description="The 2-norm; null, too, if it is beyond float64.")]


class ManyStatistics(TypedDict):
    """The statistics of several buffers, by name."""

    statistics: Annotated[
        dict[str, Statistics | None],
        Field(
            description="Null: not computed yet. An earlier version: the buffer has changed since. Ask again for both."
        ),
    ]


class Histogram(TypedDict):
    """Finite elements besides zeros, by magnitude."""

    bounds: Annotated[list[float], Field(description="Powers of 2, ascending.")]
    counts: Annotated[list[int], Field(description=HISTOGRAM)]


class StepStatistics(TypedDict):
    """A closed step."""

    step: int
    count: int
    weight: float
    mean: Annotated[float | None, Field(description="The mean of the sum's finite elements.")]
    norm: float | None
    nonfinite: Annotated[int, Field(description="Elements that are infinite or NaN.")]
    nan: Annotated[int, Field(description="Those that are NaN.")]
    closed_by: ClosedBy


class HeatMap(TypedDict):
    """Means of the finite elements of cells; null if a cell has none. The last axis runs along the columns."""

    rows: int
    columns: int
    values: list[list[float | None]]


class FullStatistics(Statistics):
    """The statistics of one buffer."""

    histogram: Histogram
    steps: Annotated[
        list[StepStatistics],
        Field(
            description="The closed steps that the buffer keeps, oldest first. Of large buffers, those computed so far."
        ),
    ]
    heat_map: NotRequired[HeatMap]
