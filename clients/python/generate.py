"""Write the client's generated modules: operators and defaults from the service's registry, and the async twins.

`python -m clients.python.generate` writes the files. A test fails when they are stale.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

operators = importlib.import_module("clients.python.methods")  # which mypy would find under two names

PACKAGE = Path(__file__).parent / "gradserve_client"


def async_ops() -> str:
    """Return the stub of the asynchronous operators, which share the types of the results."""
    results = ", ".join(f"{op.name}Outputs" for op in operators.WITH_SEVERAL)
    head = operators.HEAD.replace("_http.runner import Runner", "_async.runner import AsyncRunner")
    head += f"from gradserve_client.ops import {results}\n\n"
    return f"{operators.NOTICE.format(source='service/kernels')}{head}{operators.stubs()}"


ASYNC_CLIENT = '''class AsyncClient:
    """The client for `await`: `async with AsyncClient(url) as server: dX = await server.ops.relu_grad(dY, X)`.

    Its methods have the arguments and results of `Client`. It belongs to the event loop that first uses it.
    """'''

AWAITED = [
    (
        r"( *)(?<!@property\n    )def (?!__|place_of\b|routes\b|join\b|one_server\b|_next\b|_next_number\b)(\w+)\(",
        r"\1async def \2(",
    ),
    (r"def __(enter|exit)__", r"async def __a\1__"),
    (
        r"\b(self\.(_runner\.(run|close)|_channel\.(send|close)|_send|close|_buffers\.\w+|list|info|start|_begin|_enter|_finish|_joined|_ended)"
        r"|shard\.(run|list|close)|super\(\)\.run|runner\.run|together|(?<!def )(added|pushed|staged|learn_limits))\(",
        r"await \1(",
    ),
    (r"\btime\.sleep\(", "await anyio.sleep("),
    (r"^import time$", "import anyio"),
    (r"(?<![\w.\"`])(Buffers?|Graphs|Worker|Model|Runs|Ops|Client|Runner|Channel|Shards?)(?=[\](:,)]| *$)", r"Async\1"),
    (
        r"from gradserve_client\.(?:_http\.)?(\w+) import (?=Async|channel|together|added)",
        r"from gradserve_client._async.\1 import ",
    ),
    (r"httpx\.BaseTransport", "httpx.AsyncBaseTransport"),
    (r"The synchronous", "The asynchronous"),
    (r"\n\n *>>> (.|\n)*?(?=\n *\"\"\")", ""),
    (r'^class AsyncClient:\n *"""(.|\n)*?"""', ASYNC_CLIENT),
]
"""The replacements that make a module asynchronous, in their order. The last two drop the examples."""

_USES = Counter[str]()
"""How often each pattern was replaced."""


def awaited(source: str, module: str) -> str:
    """Return the asynchronous twin of a module: its methods are coroutines, and its docstrings have no examples."""
    for pattern, replacement in AWAITED:
        source, count = re.subn(pattern, replacement, source, flags=re.MULTILINE)
        _USES[pattern] += count
    return str(operators.NOTICE).format(source=module) + source


def generated() -> dict[Path, str]:
    """Return the text of each generated file."""
    texts = {"_wire/defaults.py": operators.defaults(), "ops.py": operators.ops(), "_async/ops.pyi": async_ops()}
    modules = (
        "_http/runner.py",
        "_http/shards.py",
        "_adding.py",
        "buffer.py",
        "buffers.py",
        "worker.py",
        "model.py",
        "graphs.py",
        "runs.py",
        "client.py",
    )
    for module in modules:
        texts[f"_async/{Path(module).name}"] = awaited((PACKAGE / module).read_text(), module)
    if unused := [pattern for pattern, _ in AWAITED if not _USES[pattern]]:
        raise ValueError(f"No module has anything that these patterns replace: {unused}")
    return {PACKAGE / name: _formatted(text, PACKAGE / name) for name, text in texts.items()}


def _formatted(text: str, path: Path) -> str:
    for command in (["check", "--fix-only", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
