"""Ask ONNX Runtime's kernels and PyTorch every question again and store the answers: `python -m tests.golden.make`.

Needs what `tests.golden.ort` and `tests.golden.torch_gru` need. The questions are the same each time, so a second run
changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from onnxruntime.capi import onnxruntime_pybind11_state as refusals

from service.dtypes import Array
from tests.golden import ort, questions, store, torch_gru
from tests.golden.questions import accumulate, activations, broadcast, gather, gru, softmax
from tests.golden.store import Case

REFUSED = (refusals.Fail, refusals.InvalidArgument, refusals.RuntimeException)


def answered(case: Case) -> Case:
    """`case` with the kernel's answer."""
    try:
        outputs = ort.run(case.operator, case.inputs, case.asked, case.attributes)
    except REFUSED as refusal:
        return replace(case, error=reason(str(refusal)))
    return filled(case, outputs)


def filled(case: Case, outputs: Mapping[str, Array]) -> Case:
    """`case` with what is stored of the outputs that it asks for."""
    return replace(case, outputs={name: case.sampled(outputs[name]) for name in case.asked})


def reason(message: str) -> str:
    """The sentence in ONNX Runtime's `message` that says what was wrong, without places in its source."""
    return message.partition("Status Message: ")[2].rpartition(" was false. ")[2].strip()


def main() -> None:
    found: dict[str, list[Case]] = defaultdict(list)
    for family in (accumulate, activations, broadcast, gather, gru, softmax):
        for case in family.ask():
            found[case.operator].append(answered(case))
    for operator, cases in found.items():
        keep(operator, cases, folder=store.FOLDER)
    cases = [filled(case, torch_gru.run(case.inputs)) for case in questions.torch_gru.ask()]
    keep("GRU", cases, folder=store.TORCH)


def keep(operator: str, cases: list[Case], *, folder: Path) -> None:
    """Store the cases, whose names must differ, and say what is stored now."""
    assert len({case.name for case in cases}) == len(cases), f"{operator}: two cases have the same name"
    path = store.write(operator, cases, folder=folder)
    refused = sum(bool(case.error) for case in cases)
    print(f"{operator}: {len(cases)} cases, {refused} of them refused, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
