"""The documentation is true: its tables match the code, its examples answer as printed, and its links have targets."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from gradserve_client._cli.commands import command as gradserve_client_command
from PIL import Image, ImageSequence

from service.api.telemetry.metrics import FAMILIES
from service.graphs.gradients import RULES
from service.graphs.nodes import NODES
from service.graphs.unrolled import OURS
from service.kernels import OPERATORS
from service.settings import Settings
from tests.commands import helps
from tests.documentation import DOCUMENTS, README, ROOT, TABLES, Block, blocks, rendered, tables
from tests.ports import free_port
from tests.serving import serving
from tests.trainers import is_trainer, script, trained, with_length

MAX_README_BYTES = 8192
"""The README's limit of bytes: a newcomer reads it in five minutes."""

MAX_PICTURE_BYTES = 1_500_000
"""The limit of the README's moving picture: a reader on a slow line sees it within seconds."""

TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
BLOCKS = {name: blocks(text) for name, text in TEXTS.items()}
MAX_PATH_BYTES = 5000
"""The limit of a page that leads a reader: the reference has the rest."""

RUN = {"bash": ("json", "text"), "python": ("text",), "go": ("text",), "javascript": ("text",)}
"""The languages of examples, and the languages of the output after each."""

PROGRAMS = {"go": (["go", "run"], "main.go"), "javascript": (["node"], "main.mjs")}
"""How a program in another language is run, and the name of its file."""

SESSIONS = ("docs/start-operations.md", "docs/start-understanding.md")
"""The pages whose blocks are one session of a shell, with a server of its own on port 8001."""

CLIENT = "clients/python/README.md"
OTHERS = ("benchmarks/README.md", CLIENT, "examples/README.md")
LINKED = sorted({*DOCUMENTS, *ROOT.glob("*.md"), *(ROOT / name for name in OTHERS)})
"""The documents whose links are checked."""


def examples() -> list[tuple[str, int, Block, str]]:
    """Return document, number, code and printed output of every example. The client's document has others besides."""
    client = blocks((ROOT / CLIENT).read_text())
    found = [
        (name, number, block, output.text)
        for name, found in {**BLOCKS, CLIENT: client}.items()
        for number, (block, output) in enumerate(itertools.pairwise(found))
        if block.language in RUN and (name != CLIENT or output.language in RUN[block.language])
    ]
    return [one for one in found if one[0] not in SESSIONS] + [session(name, found) for name in SESSIONS]


def session(name: str, found: list[tuple[str, int, Block, str]]) -> tuple[str, int, Block, str]:
    """Return all examples of a page as one. Whatever it has started ends with its shell."""
    parts = [(block.text, output) for page, _, block, output in found if page == name]
    code = "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(text for text, _ in parts)
    return name, 0, Block("bash", code, False), "".join(output for _, output in parts)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the URL of one server for all examples, as a reader has it: each has buffers of its own."""
    with serving(shared_memory=True) as url:
        yield url


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "block", "output"),
    [pytest.param(name, block, output, id=f"{name}-{number}") for name, number, block, output in examples()],
)
def test_examples_answer_as_printed(url: str, name: str, block: Block, output: str, tmp_path: Path) -> None:
    assert re.search("127.0.0.1:800[01]", block.text)
    code = block.text.replace("127.0.0.1:8000", url.removeprefix("http://")).replace("8001", str(free_port()))
    if command := command_of(block, code, tmp_path):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        given: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "timeout": 100}
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **given).stdout
    elif is_trainer(code):
        printed = trained(with_length(code, steps=60, rate=0.05), tmp_path, workers=len(output.splitlines()))
    else:
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            exec(compile(code, name, "exec"), {})
        printed = captured.getvalue()
    assert printed.strip() == output.strip()


def command_of(block: Block, code: str, folder: Path) -> list[str]:
    """Return the command that runs the code of an example. Python runs in this process: its command is empty."""
    if block.language in PROGRAMS:
        (program, *words), file = PROGRAMS[block.language]
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        (folder / file).write_text(code)
        return [program, *words, file]
    if block.language == "bash":
        return ["bash", "-euc", code]
    # absl, which JAX brings, closes pytest's stderr when a later server sets up its log
    return [sys.executable, "-c", code] if "import jax" in code else []


def test_every_recipe_saves_contiguous_arrays() -> None:
    """The safetensors library writes other arrays wrong: see tests/codecs/test_safetensors.py."""
    sources = [block.text for path in LINKED for block in blocks(path.read_text()) if block.language == "python"]
    sources += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    saved = [
        node.args[0]
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and re.search(r"(?<!torch\.)(?<!exported\.)\bsave(_file)?$", ast.unparse(node.func))
    ]
    assert saved
    for tensors in saved:
        values = [tensors.value] if isinstance(tensors, ast.DictComp) else getattr(tensors, "values", [tensors])
        assert all(ast.unparse(value).startswith("np.ascontiguousarray(") for value in values), ast.unparse(tensors)


def test_every_counter_has_the_name_that_is_exported() -> None:
    counters = [family for family in FAMILIES if family.kind == "counter"]
    for path in LINKED:
        text = path.read_text()
        assert not [family.name for family in counters if re.search(rf"\b{family.name}\b", text)], path


def test_every_block_is_an_example_its_output_or_a_transcript() -> None:
    for name, found in BLOCKS.items():
        for before, block in zip([Block("", "", False), *found], [*found, Block("", "", False)], strict=True):
            if block.language not in RUN.get(before.language, ()) or not block.follows:
                assert before.language not in RUN, f"{name}: no output follows\n{before.text}"
                assert block.language in (*RUN, "console", "drawing", ""), f"{name}: nothing prints\n{block.text}"
                assert block.language or not block.text, f"{name}: of no language\n{block.text}"


def test_the_architecture_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", TEXTS["docs/architecture.md"])
    files = [
        f"/{path.relative_to(ROOT)}" for room in ("service", "clients", "tests") for path in (ROOT / room).rglob("*.py")
    ]
    files += [f"/{path.name}" for path in ROOT.glob("*.py")]
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def test_every_block_is_found() -> None:
    fences = {name: text.count("```") for name, text in TEXTS.items()}
    assert fences == {name: 2 * len(found) for name, found in BLOCKS.items()}


def test_tables_are_fresh() -> None:
    for name, text in TEXTS.items():
        assert rendered(text) == text, f"{name} is stale: run `make docs`"


def test_every_table_is_in_one_document() -> None:
    assert sorted(name for text in TEXTS.values() for name in tables(text)) == sorted(TABLES)
    assert sum(text.count("make docs -->") for text in TEXTS.values()) == len(TABLES)


def test_the_readme_counts_the_operators() -> None:
    """59 kernels of ONNX Runtime's, and the others by their names; then all of them, and those of graphs."""
    text = (ROOT / "README.md").read_text()
    (count,) = re.findall(r"training CPU kernels, all (\d+),", text)
    others = {"FusedMatMul", "ConvTransposeGrad", "ResizeGrad", "PadAndUnflatten"}
    assert others <= OPERATORS.keys()
    assert all(name in text for name in others)
    assert int(count) <= len(OPERATORS.keys() - others)
    assert f"| {len(OPERATORS)} |" in text
    served = {key for key in NODES if key[0] != OURS}
    assert f"| {len(served)}; {len(served & RULES.keys())} |" in text


def test_every_cell_of_the_comparison_has_a_source() -> None:
    """Each of the README's table: a section for each system, with an answer and a source for each criterion."""
    rows = re.findall(r"^\|(.+)\|$", README.read_text().partition("## Why not")[2].partition("\n## ")[0], re.MULTILINE)
    systems, criteria = [name.strip() for name in rows[0].split("|")[1:]], len(rows) - 2
    wanted = {"Redis", "torch.distributed", "torchft", "Hivemind", "Tinker's API", "Flower", "NVFlare", "Triton"}
    assert wanted < set(systems)
    sections = TEXTS["docs/comparison.md"].split("\n## ")
    for system in systems:
        (section,) = (text for text in sections if text.startswith(system))
        answers = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|\s][^|]* \|$", section, re.MULTILINE)[1:]
        assert len(answers) == section.count("\n|") - 2 >= criteria, system


def test_the_readmes_program_is_the_example() -> None:
    assert script() == (ROOT / "examples" / "train.py").read_text()


def test_the_readme_and_the_paths_are_short() -> None:
    assert len(README.read_bytes()) <= MAX_README_BYTES
    paths = [*(ROOT / "docs").glob("start-*.md")]
    assert len(paths) == 6
    assert {path.name: size for path in paths if (size := len(path.read_bytes())) > MAX_PATH_BYTES} == {}


# ----- links -----


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    """Return the local targets of a document's links."""
    found = re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", path.read_text())
    return [link for link in found if not re.match(r"https?://", link)]


def targets(path: Path) -> set[Path]:
    """Return the files that a document links to."""
    return {(path.parent / link.partition("#")[0]).resolve() for link in links(path)}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(path: Path) -> None:
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_every_document_is_reached_from_the_readme() -> None:
    """A path is linked at least from the page that its readers come to; every other document from the README."""
    direct = targets(README)
    paths = {path for path in LINKED if path.name.startswith("start-")}
    assert direct >= set(LINKED) - paths - {README}
    assert paths <= direct.union(*(targets(path) for path in direct & set(LINKED)))


# ----- names in the text -----


PAGE = [path for path in sorted((ROOT / "service/api/dashboard/page").glob("*.*")) if path.suffix in (".js", ".html")]
COMMAND = re.compile(r"(?<![^\s/`\"'(])(gradserve-client|gradserve|make) (?!gradserve\b)([a-z][^|<>;#()`\"'&\\]*)")


def code(path: Path) -> Iterator[str]:
    """Yield what a document has in backticks, what its transcripts type, and its shell scripts; or a page's strings."""
    text = path.read_text()
    if path in PAGE:
        yield from re.findall(r"[`\"'](gradserve[^`\"'\n]*)", text)
        return
    for block in blocks(text):
        typed = r"^\$ (.*)$" if block.language == "console" else r"^(.*)$"
        if block.language in ("console", "bash"):
            yield from re.findall(typed, block.text, re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        yield re.sub(r"^(?=buffers [a-z])", "gradserve-client ", span)


def named(program: str) -> list[tuple[str, list[str]]]:
    """Return each file with the words behind the name of this program in its commands."""
    lines = [(str(path.relative_to(ROOT)), line) for path in (*LINKED, *PAGE) for line in code(path)]
    return [(path, words.split()) for path, line in lines for name, words in COMMAND.findall(line) if name == program]


def unknown(words: list[str], options: Mapping[str, set[str]]) -> list[str]:
    """Return the words that are no command and no option, given each command's options by its words."""
    command = ""
    while words and f"{command} {words[0]}".lstrip() in options:
        command = f"{command} {words.pop(0)}".lstrip()
    wrong = [word for word in words if re.match("--?[a-z]", word) and word not in options[command] | options[""]]
    has_commands = any(other.startswith(f"{command} ".lstrip()) for other in options if other != command)
    return wrong + words[:1] * has_commands


def options_of_the_server() -> dict[str, set[str]]:
    return {
        name.removeprefix("gradserve").strip(): {*re.findall(r"(?<!\S)\[?(--?[a-z-]+)", text)} for name, text in helps()
    }


def options_of_the_client(command: click.Command | None = None, name: str = "") -> dict[str, set[str]]:
    command = command or gradserve_client_command()
    found = {name: {option for one in command.params for option in one.opts + one.secondary_opts}}
    for below, one in getattr(command, "commands", {}).items():
        found |= options_of_the_client(one, f"{name} {below}".lstrip())
    return found


@pytest.mark.parametrize(
    ("program", "options"), [("gradserve", options_of_the_server), ("gradserve-client", options_of_the_client)]
)
def test_named_commands_exist(program: str, options: Callable[[], dict[str, set[str]]]) -> None:
    known, commands = options(), named(program)
    assert len(commands) > 10
    assert not [(path, *words) for path, words in commands if unknown([*words], known)]


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = {(path, words[0]) for path, words in named("make")}
    assert {"run", "up", "examples", "bench"} <= {target for _, target in found}
    for path, target in found:
        module = ROOT / "benchmarks" / f"{target.removeprefix('bench-')}.py"
        assert re.search(rf"^{target}:", makefile, re.MULTILINE) or module.is_file(), f"{path}: make {target}"


def test_named_settings_exist() -> None:
    known = {f"GRADSERVE_{name.upper()}" for name in Settings.model_fields}
    known |= {"GRADSERVE_URL", "GRADSERVE_API_KEY"}  # these belong to the client
    for file in ("compose.yaml", "deploy/containers/podman.yaml"):
        known |= set(re.findall(r"\${(GRADSERVE_[A-Z_]+)", (ROOT / file).read_text()))
    for name, text in TEXTS.items():
        assert set(re.findall(r"\bGRADSERVE_[A-Z_]+\b", text)) <= known, name


def test_the_moving_picture_is_small_and_of_ten_seconds() -> None:
    path = ROOT / "docs" / "images" / "training.gif"
    assert path.stat().st_size <= MAX_PICTURE_BYTES
    with Image.open(path) as picture:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(picture)]
    assert len(durations) > 20
    assert 8_000 <= sum(durations) <= 12_000


def test_every_alert_is_explained() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "alerts.yml").read_text())
    assert alerts
    assert {name for name in alerts if name not in TEXTS["docs/operations.md"]} == set()


def test_every_setting_is_used() -> None:
    sources = "".join(path.read_text() for path in Path(ROOT / "service").rglob("*.py"))
    for name in Settings.model_fields:
        assert re.search(rf"\bsettings(_of\([\w.]+\))?\.{name}\b", sources), name
