"""The language of texts and code: the two rules of CONTRIBUTING.md that a program can judge."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.api.server import create_app
from service.api.telemetry.metrics import FAMILIES, GAUGES
from service.api.telemetry.processes import INFORMATION
from service.errors import GradserveError, tree
from service.settings import Settings
from tests.commands import helps
from tests.documentation import PROCESSES

ROOT = Path(__file__).parent.parent

MAX_TITLE_WORDS = 6

BANNED = (
    "whoever",
    "of which",
    "in which",
    "so many",
    "of then",
    "anew",
    "is told",
    "be told",
    "are told",
    "none that",
    "but for",
)

Texts = Iterator[tuple[str, str]]
"""Pairs of a place and the text there."""


def banned(text: str) -> Iterator[tuple[int, str]]:
    """The line and the words of each banned construction. Code in backticks is not judged: rules quote it."""
    prose = re.sub(r"`[^`\n]+`", lambda code: " " * len(code[0]), text)
    phrases = "|".join(phrase.replace(" ", r"\s+") for phrase in BANNED)
    for match in re.finditer(rf"\b({phrases})\b", prose, re.IGNORECASE):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def has_short_title(error: type[GradserveError]) -> bool:
    return 0 < len(error.title().split()) <= MAX_TITLE_WORDS


def errors() -> Texts:
    for error in tree():
        yield error.__name__, error.__doc__ or ""


def settings() -> Texts:
    for name, field in Settings.model_fields.items():
        yield name, field.description or ""


def openapi() -> Texts:
    def walk(place: str, node: Any) -> Texts:
        members = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for name, member in members:
            if name in ("description", "summary", "title") and isinstance(member, str):
                yield f"{place}/{name}", member
            yield from walk(f"{place}/{name}", member)

    yield from walk("", create_app(Settings(store="memory:")).openapi())


def metrics() -> Texts:
    yield from ((family.name, family.help) for family in FAMILIES)
    yield from GAUGES.items()
    yield from ((name, meaning) for name, (_, meaning) in (PROCESSES | INFORMATION).items())


def documentation() -> Texts:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    files += [ROOT / "clients/python/README.md", ROOT / "examples/README.md"]
    yield from ((str(file.relative_to(ROOT)), file.read_text()) for file in sorted(files))


def code() -> Texts:
    """The comments and docstrings of the service and of the client, generated files too."""
    files = [*ROOT.glob("service/**/*.py"), *ROOT.glob("clients/python/gradserve_client/**/*.py")]
    yield from ((str(file.relative_to(ROOT)), comments_and_docstrings(file.read_text())) for file in sorted(files))


def page() -> Texts:
    """The files of the page at `/`, with the texts that it shows. What is vendored is not ours."""
    files = [path for path in ROOT.glob("service/api/dashboard/page/*") if path.is_file()]
    yield from ((path.name, path.read_text()) for path in sorted(files))


def comments_and_docstrings(source: str) -> str:
    """The source with blanks in place of code, so that the lines keep their numbers."""
    lines = source.splitlines()
    prose = [""] * len(lines)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            prose[token.start[0] - 1] = token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose[node.lineno - 1 : node.end_lineno] = lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(prose)


SOURCES: dict[str, Callable[[], Texts]] = {
    "errors": errors,
    "settings": settings,
    "command line": helps,
    "OpenAPI": openapi,
    "metrics": metrics,
    "documentation": documentation,
    "code": code,
    "page": page,
}


@pytest.mark.parametrize("source", SOURCES)
def test_texts_have_no_banned_construction(source: str) -> None:
    texts = list(SOURCES[source]())
    assert len(texts) > 5
    faults = [f"{place}, line {line}: {words}" for place, text in texts for line, words in banned(text)]
    assert not faults, "\n".join(faults)


def test_titles_of_errors_are_short() -> None:
    faults = [f"{error.__name__}: {error.title()}" for error in tree() if not has_short_title(error)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("A key is needed, and this is none that is good.", [(1, "none that")]),
        (
            "Whoever asks\nwaits for so\nmany bytes, of which none come.",
            [(1, "Whoever"), (2, "so many"), (3, "of which")],
        ),
        ("All but for one is told anew.", [(1, "but for"), (1, "is told"), (1, "anew")]),
        ("Banned: `of which`, `anew`.", []),
        ("The buttons of the whichever.", []),
    ],
)
def test_the_checker_finds_banned_constructions(text: str, faults: list[tuple[int, str]]) -> None:
    assert list(banned(text)) == faults


def test_the_checker_finds_long_titles() -> None:
    long = type("Long", (GradserveError,), {"__doc__": "The client sent far too many of them."}, code="long")
    short = type("Short", (GradserveError,), {"__doc__": "Too many tensors.\n\nMore text."}, code="short")
    assert [has_short_title(long), has_short_title(short)] == [False, True]


def test_the_checker_reads_comments_and_docstrings_only() -> None:
    source = '''"""A rule of which
nobody knows."""
NAME = "of which"  # anew
# a block of
# which two lines are a text
def function() -> None:
    """Whoever calls this."""
'''
    faults = [(1, "of which"), (3, "anew"), (4, "of which"), (7, "Whoever")]
    assert list(banned(comments_and_docstrings(source))) == faults


def test_every_command_is_found() -> None:
    names = {place for place, _ in helps()}
    assert {"gradserve", "gradserve serve", "gradserve keys", "gradserve keys add"} <= names
