"""Ask the other implementations every question again and store the answers: `python -m tests.golden.make`.

`python -m tests.golden.make torch` asks only PyTorch, and `onnxruntime` only ONNX Runtime's kernels. Each needs what
its modules need. The questions are the same each time, so a second run changes nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from service.dtypes import Array
from tests.golden import questions, store
from tests.golden.questions import accumulate, activations, broadcast, gather, gru, softmax
from tests.golden.store import Case


def of_onnxruntime() -> Iterator[Case]:
    """Yield the cases with the answers of ONNX Runtime's kernels."""
    from onnxruntime.capi import onnxruntime_pybind11_state as refusals

    from tests.golden import ort

    refused = (refusals.Fail, refusals.InvalidArgument, refusals.RuntimeException)
    for family in (accumulate, activations, broadcast, gather, gru, softmax):
        for asked in family.ask():
            case = replace(asked, source=ort.SOURCE)
            try:
                yield filled(case, ort.run(case.operator, case.inputs, case.asked, case.attributes))
            except refused as refusal:
                yield replace(case, error=reason(str(refusal)))


def of_torch() -> Iterator[Case]:
    """Yield the cases with the answers of PyTorch."""
    from tests.golden import torch_activations, torch_gru

    source = f"torch {version('torch').partition('+')[0]}"
    for case in torch_activations.ask():
        answers = torch_activations.run(case.operator, case.inputs, case.attributes)
        yield filled(replace(case, source=source), answers)
    for case in questions.torch_gru.ask():
        yield filled(replace(case, source=source), torch_gru.run(case.inputs))


SOURCES: dict[str, tuple[Path, Callable[[], Iterator[Case]]]] = {
    "onnxruntime": (store.FOLDER, of_onnxruntime),
    "torch": (store.TORCH, of_torch),
}


def filled(case: Case, outputs: Mapping[str, Array]) -> Case:
    """`case` with what is stored of the outputs that it asks for."""
    return replace(case, outputs={name: case.sampled(outputs[name]) for name in case.asked})


def reason(message: str) -> str:
    """The sentence in ONNX Runtime's `message` that says what was wrong, without places in its source."""
    return message.partition("Status Message: ")[2].rpartition(" was false. ")[2].strip()


def main() -> None:
    for source in sys.argv[1:] or SOURCES:
        folder, answered = SOURCES[source]
        found: dict[str, list[Case]] = defaultdict(list)
        for case in answered():
            found[case.operator].append(case)
        for operator, cases in found.items():
            keep(operator, cases, folder=folder)


def keep(operator: str, cases: list[Case], *, folder: Path) -> None:
    """Store the cases, whose names must differ, and say what is stored now."""
    assert len({case.name for case in cases}) == len(cases), f"{operator}: two cases have the same name"
    path = store.write(operator, cases, folder=folder)
    refused = sum(bool(case.error) for case in cases)
    print(f"{operator}: {len(cases)} cases, {refused} of them refused, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
