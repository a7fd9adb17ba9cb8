"""The answers of other implementations as they are stored: one .npz for each operator, with every case in it.

The array `source` names the program that answered, with its version. The key of any other array is `case/place/name`;
the place is `input`, `attribute` or `output`, or `drawn`, which holds the shape of an input that `draw` gives.
`case/error` holds the message of a case that the kernel refuses, `case/sample` the distance between the stored elements
of a large output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.values import uniform

FOLDER = Path(__file__).parent
"""The answers of ONNX Runtime's kernels."""
TORCH = FOLDER / "torch"
"""Those of PyTorch."""
PAIRS = ("GRU", "LSTM")
"""Names of files in `TORCH` with the answers of two operators together."""


@dataclass(frozen=True)
class Case:
    """A question to one operator and, once asked, the answer: the outputs asked for, or `error` where it refused.

    `source` is who answers, "onnxruntime" or "torch", and, once asked, also the version.
    """

    operator: str
    name: str
    inputs: Mapping[str, Array]
    asked: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Array] = field(default_factory=dict)
    error: str = ""
    sample: int = 1
    drawn: bool = False  # `inputs` are what `draw` gives, and not stored
    source: str = "onnxruntime"

    def sampled(self, output: Array) -> Array:
        """`output` as it is stored: whole, or each `sample`-th element of it."""
        return output if self.sample == 1 else output.ravel()[:: self.sample]


def draw(case: str, shapes: Mapping[str, Iterable[int]]) -> dict[str, Array]:
    """Random inputs for the case of this name, name -> array, from name -> shape."""
    return {name: uniform(tuple(shape), case, name) for name, shape in shapes.items()}


def kept(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes as ONNX keeps them: a float has 32 bits."""
    arrays = {name: np.asarray(value) for name, value in attributes.items()}
    return {name: (one.astype(np.float32) if one.dtype.kind == "f" else one).tolist() for name, one in arrays.items()}


def write(operator: str, cases: Sequence[Case], *, folder: Path = FOLDER) -> Path:
    """Store the cases of `operator`, which one source answered, in place of what was stored."""
    (source,) = {case.source for case in cases}
    arrays: dict[str, Array] = {"source": np.array(source)}
    for case in cases:
        shapes = {name: array.shape for name, array in case.inputs.items()}
        places: dict[str, Mapping[str, object]] = {"drawn": shapes} if case.drawn else {"input": case.inputs}
        places |= {"attribute": case.attributes, "output": case.outputs}
        for place, values in places.items():
            arrays.update({f"{case.name}/{place}/{name}": np.asarray(value) for name, value in values.items()})
        if case.error:
            arrays[f"{case.name}/error"] = np.array(case.error)
        if case.sample != 1:
            arrays[f"{case.name}/sample"] = np.array(case.sample)
    path = folder / f"{operator}.npz"
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path


def operators(folder: Path = FOLDER) -> list[str]:
    """The operators that have stored answers in the folder."""
    return sorted(path.stem for path in folder.glob("*.npz") if path.stem not in PAIRS)


def read(operator: str, *, folder: Path = FOLDER) -> list[Case]:
    """The cases of `operator`, in the order in which they were asked."""
    found: dict[str, dict[str, dict[str, Array]]] = defaultdict(lambda: defaultdict(dict))
    with np.load(folder / f"{operator}.npz") as file:
        arrays = dict(file.items())
        source = str(arrays.pop("source"))
        for key, array in arrays.items():
            case, place, *name = key.split("/")
            found[case][place]["".join(name)] = array
    return [
        Case(
            operator,
            case,
            places["input"] or draw(case, places["drawn"]),
            tuple(places["output"]),
            kept(places["attribute"]),
            places["output"],
            str(places["error"].get("", "")),
            int(places["sample"].get("", 1)),
            "drawn" in places,
            source,
        )
        for case, places in found.items()
    ]
