"""The documents, their code blocks and their generated tables. `python -m tests.documentation` writes the tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from service.api.dashboard.limits import CONSTANTS
from service.api.operators.onnx_names import NOT_SERVED
from service.api.telemetry.metrics import FAMILIES, GAUGES
from service.api.telemetry.processes import INFORMATION
from service.errors import tree
from service.graphs.gradients import RULES
from service.graphs.nodes import NODES
from service.graphs.nodes.table import with_attributes
from service.graphs.unrolled import OURS
from service.kernels import OPERATORS, Attribute, Operator, Tensor
from service.settings import Settings

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
"""What is read, run and kept fresh by tests/test_docs.py."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A code block: its language, its text, and whether it follows the block before without a word between."""

    language: str
    text: str
    follows: bool


PROCESSES = {
    "process_cpu_seconds_total": ("counter", "Processor time, in seconds."),
    "process_resident_memory_bytes": ("gauge", "Bytes of memory in use, with the mapped pages of the store."),
    "process_virtual_memory_bytes": ("gauge", "Bytes of address space, with the whole map of the store."),
    "process_open_fds": ("gauge", "Open file descriptors, connections among them."),
    "process_max_fds": ("gauge", "File descriptors that the process may have open, at most."),
    "process_start_time_seconds": ("gauge", "When the process started, in seconds since 1970."),
}
"""The kinds and the meanings of the metrics with the label `pid`. Only Linux has them: they are read from /proc."""


def blocks(text: str) -> list[Block]:
    """The code blocks of a document, in order."""
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        found.append(Block(match[1], match[2], not text[end : match.start()].strip()))
        end = match.end()
    return found


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n" for cells in lines)


def operators() -> str:
    """A table for each family of operators."""
    families: dict[str, list[Operator]] = {}
    for operator in OPERATORS.values():
        families.setdefault(operator.family, []).append(operator)
    return "\n".join(f"### {name}\n\n{_family(members)}" for name, members in sorted(families.items()))


def not_served() -> str:
    """The operators that are not served, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in NOT_SERVED.items():
        reasons.setdefault(why, []).append(name)
    return table(("operators", "why not"), ((", ".join(names), why) for why, names in reasons.items()))


def _family(members: Iterable[Operator]) -> str:
    return table(
        ("operator", "inputs -> outputs", "attributes", "formula"),
        (
            (
                operator.name,
                f"{_names(operator.inputs)} -> {_names(operator.outputs)}",
                ", ".join(map(_attribute, operator.attributes)),
                f"`{operator.formula.rstrip('.').replace('`', '')}`",
            )
            for operator in members
        ),
    )


def _names(tensors: Iterable[Tensor]) -> str:
    return ", ".join(one.name + ".*" * one.group + "?" * one.optional for one in tensors)


def _attribute(attribute: Attribute) -> str:
    notes = ["required"] * attribute.required
    notes += [] if attribute.minimum is None else [f"at least {attribute.minimum}"]
    text = attribute.name if attribute.required else f"{attribute.name} = {attribute.default}"
    return text + (f" ({', '.join(notes)})" if notes else "")


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
    rows = ((f"`{name}`", str(value), meaning) for name, (value, meaning) in CONSTANTS.items())
    return table(("limit", "value", "meaning"), rows)


def metrics() -> str:
    ends = {"counter": "_total"}  # a histogram has the series `_bucket`, `_sum` and `_count` of its name
    rows = [(one.name + ends.get(one.kind, ""), one.kind, ", ".join(one.labels), one.help) for one in FAMILIES]
    rows += [(name, "gauge", "", meaning) for name, meaning in GAUGES.items()]
    rows += [(name, kind, "pid", meaning) for name, (kind, meaning) in PROCESSES.items()]
    rows += [(name, "gauge", ", ".join(labels), meaning) for name, (labels, meaning) in INFORMATION.items()]
    return table(("metric", "kind", "labels", "meaning"), ((f"`{name}`", *rest) for name, *rest in rows))


FAMILIES_OF_MODULES = {
    "elementwise": "Arithmetic, element by element",
    "activations": "Activations",
    "products": "Matrices and layers",
    "attention": "Matrices and layers",
    "layers": "Matrices and layers",
    "recurrent": "Recurrent layers",
    "reductions": "Reductions",
    "shapes": "Shapes and slices",
    "indexing": "Indexing",
    "noise": "Random numbers and constants",
    "kernels": "Training nodes of ONNX Runtime",
}
"""The family of the operators of each module of nodes."""

FAMILIES_OF_NAMES = {
    "Activations": r"Relu|Tanh|Softmax|LogSoftmax|Dropout|Gelu|QuickGelu",
    "Comparisons and logic": r"And|Or|Xor|Not|Where|Bit.*|Equal|(Greater|Less)(OrEqual)?|Is(Inf|NaN)",
    "Normalizations": r"LRN|[A-Za-z]*Normalization",
    "Pools and resizing": r"[A-Za-z]*Pool|Resize|GridSample",
    "Losses": r"[A-Za-z]*Loss",
    "Matrices and layers": r"FusedMatMul",
    "Random numbers and constants": r"ConstantOfShape|EyeLike|Range",
}
"""The families of operators whose module has other families, too: those whose names match."""


def nodes() -> str:
    """The operators that models may have, by family, and whether the server differentiates them."""
    families: dict[str, list[tuple[str, str]]] = {}
    served = {key for key in NODES if key[0] != OURS}
    for key in sorted(served, key=lambda key: key[::-1]):
        families.setdefault(_family_of(*key), []).append(key)
    rows = [
        (family, *(", ".join(_shown(*key) for key in keys if (key in RULES) is has_rule) for has_rule in (True, False)))
        for family, keys in sorted(families.items())
    ]
    number = f"{len(served)} operators, {len(served & RULES.keys())} of them with gradients."
    return f"{table(('family', 'with a gradient', 'without'), rows)}\n{number}\n"


def _family_of(domain: str, op: str) -> str:
    function: Any = NODES[domain, op]
    while isinstance(function, partial):
        function = function.args[0] if function.func is with_attributes else function.func
    module = function.__module__.rpartition(".")[2]
    is_known = not domain or (domain, op) in RULES
    matching = (family for family, names in FAMILIES_OF_NAMES.items() if is_known and re.fullmatch(names, op))
    return next(matching, FAMILIES_OF_MODULES[module])


def _shown(domain: str, op: str) -> str:
    is_apart = domain and (("", op) in NODES or (domain, op) in RULES)
    return f"{domain}.{op}" if is_apart else op


TABLES = {make.__name__: make for make in (operators, not_served, nodes, errors, settings, limits, metrics)}
"""The generated tables, by the names in their marks."""

_TABLE = re.compile(r"(<!-- (\w+): make docs -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(text: str) -> list[str]:
    """The names of the generated tables in a document."""
    return [match[2] for match in _TABLE.finditer(text)]


def rendered(text: str) -> str:
    """`text` with every generated table fresh."""
    return _TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(rendered(document.read_text()))
