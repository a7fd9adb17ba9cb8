"""The generated tables of the README and of docs/operations.md. `python -m tests.readme` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from service.api.health import CONSTANTS, SETTINGS
from service.api.telemetry.metrics import FAMILIES, GAUGES
from service.errors import tree
from service.kernels import OPERATORS, Tensor
from service.settings import Settings

README = Path(__file__).parent.parent / "README.md"
OPERATIONS = README.parent / "docs" / "operations.md"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def operators() -> str:
    def names(tensors: Iterable[Tensor]) -> str:
        return ", ".join(one.name + "?" * one.optional for one in tensors)

    return table(
        ("operator", "inputs -> outputs", "attributes", "formula"),
        (
            (
                operator.name,
                f"{names(operator.inputs)} -> {names(operator.outputs)}",
                ", ".join(f"{a.name} = {a.default}" for a in operator.attributes),
                f"`{operator.formula.rstrip('.').replace('`', '')}`",
            )
            for operator in OPERATORS.values()
        ),
    )


def errors() -> str:
    rows = sorted((str(error.status), f"`{error.code}`", error.title()) for error in tree())
    return table(("status", "code", "meaning"), rows)


def settings() -> str:
    return table(
        ("variable", "default", "meaning"),
        (
            (
                f"`GRADSERVE_{name.upper()}`",
                "the cores" if field.default_factory else str(field.default),
                field.description or "",
            )
            for name, field in Settings.model_fields.items()
        ),
    )


def limits() -> str:
    fields = Settings.model_fields
    rows = [
        (f"`{name}`", str(fields[name].default), f"`GRADSERVE_{name.upper()}`", fields[name].description or "")
        for name in SETTINGS
    ]
    rows += [(f"`{name}`", str(value), "", meaning) for name, (value, meaning) in CONSTANTS.items()]
    return table(("limit", "default", "setting", "meaning"), rows)


def metrics() -> str:
    families = [(one.name, one.kind, ", ".join(one.labels), one.help) for one in FAMILIES]
    gauges = [(name, "gauge", "", meaning) for name, meaning in GAUGES.items()]
    rows = ((f"`{name}`", *rest) for name, *rest in families + gauges)
    return table(("metric", "kind", "labels", "meaning"), rows)


def rendered(text: str) -> str:
    """`text` with every generated table as it should be: those that it has marks for."""
    for make in (operators, errors, settings, limits, metrics):
        if f"<!-- {make.__name__}: make docs -->" not in text:
            continue
        block = f"(<!-- {make.__name__}: make docs -->\n).*?(<!-- end -->)"
        text, count = re.subn(block, lambda match, make=make: match[1] + make() + match[2], text, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1, make.__name__
    return text


if __name__ == "__main__":
    for file in (README, OPERATIONS):
        file.write_text(rendered(file.read_text()))
