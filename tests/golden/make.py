"""Ask the other implementations every question again and store the answers: `python -m tests.golden.make`.

`python -m tests.golden.make torch` asks only PyTorch, `onnxruntime` only ONNX Runtime's kernels, and `softmax` only
the questions of that family. Each needs what its modules need. The questions are the same each time, so a second run
changes nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from tests.golden import child, questions, store
from tests.golden.store import Case

FOLDERS: dict[str, Path] = {"onnxruntime": store.FOLDER, "torch": store.TORCH}


def answered(case: Case, family: str) -> Case:
    """The case with its answer, and of each output that it asks for what is stored."""
    attributes = store.kept(case.attributes)
    if case.source == "torch":
        run = partial(import_module(f"tests.golden.torch_{family}").run, case.operator, case.inputs, attributes)
        source = f"torch {version('torch').partition('+')[0]}"
    else:
        ort = import_module("tests.golden.ort")
        run, source = partial(ort.run, case.operator, case.inputs, case.asked, attributes), ort.SOURCE
    case = replace(case, source=source)
    try:
        outputs = child.ask(run)
    except child.Refused as refusal:
        return replace(case, error=str(refusal))
    names = [name for asked in case.asked for name in outputs if asked in (name, name.partition(".")[0])]
    return replace(case, outputs={name: case.sampled(outputs[name]) for name in names})


def main() -> None:
    sources = [word for word in sys.argv[1:] if word in FOLDERS] or FOLDERS
    families = [word for word in sys.argv[1:] if word not in FOLDERS] or questions.families()
    for family in families:
        found: dict[tuple[str, str], list[Case]] = defaultdict(list)
        for case in import_module(f"tests.golden.questions.{family}").ask():
            if case.source in sources:
                found[case.operator, case.source].append(answered(case, family))
        for (operator, source), cases in found.items():
            keep(operator, cases, folder=FOLDERS[source])


def keep(operator: str, cases: list[Case], *, folder: Path) -> None:
    """Store the cases, whose names must differ, and say what is stored now."""
    assert len({case.name for case in cases}) == len(cases), f"{operator}: two cases have the same name"
    path = store.write(operator, cases, folder=folder)
    refused = sum(bool(case.error) for case in cases)
    print(f"{operator}: {len(cases)} cases, {refused} of them refused, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
