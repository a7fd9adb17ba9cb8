"""The models of the zoo, exported by both exporters of PyTorch, over HTTP, against PyTorch in float64.

`make test` has those of `QUICK`. `make graphs` sets GRADSERVE_ZOO=whole for all, with the models of Hugging Face, and
writes the table build/zoo.md.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from gradserve_client import Client, InvalidInput

from tests.graphs.zoo.check import delete, put, worst_error
from tests.graphs.zoo.example import ZOO
from tests.graphs.zoo.exports import EXPORTERS, check_the_same, optimized
from tests.graphs.zoo.outcomes import REFUSED, UNEXPORTED

WHOLE = os.environ.get("GRADSERVE_ZOO") == "whole"

MODULES = ["attention", "dense", "losses", "pictures", "sequences", "tables", "vision"]

TABLE = Path(__file__).parents[3] / "build" / "zoo.md"

for module in MODULES + ["hugging_face"] * WHOLE:
    importlib.import_module(f"{__package__}.{module}")

QUICK = {
    "default": ["batch_norm_dropout", "convnext", "encoder", "mixture_of_experts", "unet"],
    "old": ["clip", "dlrm_sums", "gpt_chunk", "lstm_tagger", "resnet", "seq2seq_lstm", "swiglu"],
}
"""For each exporter, the models that `make test` trains."""

CHANGED = ["clip", "gpt_rope", "tied_small", "two_gn", "two_ln", "unet"]
"""Models that the optimizer of the exporter changes: it merges, unties or folds parameters."""

CASES = [(name, form) for form in EXPORTERS for name in ZOO if WHOLE or name in QUICK[form]]
UNUSUAL = UNEXPORTED.keys() | REFUSED.keys()


def cases(table: Collection[str] | None = None) -> pytest.MarkDecorator:
    """Parametrize with the exports in this table, by default with those in none."""
    named = {f"{name} {form}": (name, form) for name, form in CASES}
    chosen = [key for key in named if (key in table if table is not None else key not in UNUSUAL)]
    return pytest.mark.parametrize(("name", "form"), [named[key] for key in chosen], ids=chosen)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[tuple[str, str], str]]:
    """What came of each export. The whole zoo writes it as a table."""
    found: dict[tuple[str, str], str] = {}
    yield found
    if WHOLE:
        TABLE.parent.mkdir(exist_ok=True)
        opsets = {name: {"default": one.opset, "old": one.old} for name, one in ZOO.items()}
        lines = [f"| {name} | {form} | {opsets[name][form]} | {said} |" for (name, form), said in sorted(found.items())]
        TABLE.write_text("\n".join(["| model | exporter | opset | outcome |", "| --- | --- | --- | --- |", *lines, ""]))


@cases()
def test_a_model_trains_as_in_pytorch(server: Client, rows: dict[tuple[str, str], str], name: str, form: str) -> None:
    example = ZOO[name]
    info = put(server, example, form, EXPORTERS[form](example))
    rows[name, form] = "WRONG"
    try:
        rows[name, form] = f"right, {worst_error(server, example, info):.0e}"
        assert not info.doubts
    finally:
        delete(server, name)


@cases(REFUSED)
def test_what_is_refused_is_named(server: Client, rows: dict[tuple[str, str], str], name: str, form: str) -> None:
    example = ZOO[name]
    with pytest.raises(InvalidInput, match=re.escape(REFUSED[f"{name} {form}"])) as caught:
        put(server, example, form, EXPORTERS[form](example))
    rows[name, form] = f"refused: {caught.value}"


@cases(UNEXPORTED)
def test_what_pytorch_does_not_export(rows: dict[tuple[str, str], str], name: str, form: str) -> None:
    example, reason = ZOO[name], UNEXPORTED[f"{name} {form}"]
    with pytest.raises(Exception, match=re.escape(reason)):
        check_the_same(example, EXPORTERS[form](example))
    rows[name, form] = f"PyTorch: {reason}"


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_that_the_exporter_has_changed_has_doubts(server: Client, name: str) -> None:
    info = put(server, ZOO[name], "default", optimized(ZOO[name]))
    delete(server, name)
    assert info.doubts


@pytest.mark.parametrize("name", [name for name in ZOO if WHOLE and f"{name} default" not in UNUSUAL])
def test_no_model_is_wrong_without_a_doubt(server: Client, name: str) -> None:
    example = ZOO[name]
    if name == "densenet":  # one of its scales has become a running statistic
        with pytest.raises(InvalidInput, match="optimize=False"):
            put(server, example, "optimized", optimized(example))
        return
    info = put(server, example, "optimized", optimized(example))
    try:
        assert info.doubts or worst_error(server, example, info)
    finally:
        delete(server, name)
