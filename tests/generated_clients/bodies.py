"""The JSON bodies of the documentation's requests, as TypeScript, whose compiler checks their types."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from tests.documentation import DOCUMENTS, blocks

HEAD = """import type { paths } from "./api.js";

type Body<P extends keyof paths, M extends keyof paths[P]> =
  paths[P][M] extends { requestBody?: { content: { "application/json": infer B } } } ? B : never;

// @ts-expect-error: a body that does not fit is refused
export const wrong: Body<"/v1/buffers/{name}", "put"> = { shape: "2" };
"""


class Sent(NamedTuple):
    """A body, and where the documentation sends it."""

    path: str
    method: str
    body: Any


def sent(paths: Iterable[str]) -> Iterator[Sent]:
    """Yield the bodies of all curl commands, with the paths of the OpenAPI document."""
    patterns = {path: re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))) for path in paths}
    for document in DOCUMENTS:
        for block in blocks(document.read_text()):
            if block.language == "bash":
                for url, method, body in _requests(block.text):
                    path = min((path for path, pattern in patterns.items() if pattern.fullmatch(url)), key=_parameters)
                    yield Sent(path, method, body)


def _parameters(path: str) -> int:
    return path.count("{")


def _requests(script: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the method and the body of each curl command with a body in JSON."""
    variables = dict(re.findall(r"^(\w+)=(http\S+)", script, re.MULTILINE))
    words = shlex.split(script)
    starts = [place for place, word in enumerate(words) if word.endswith("curl")]
    for start, end in pairwise([*starts, len(words)]):
        command = words[start:end]
        if "-d" in command and (body := command[command.index("-d") + 1].rstrip(";)")).startswith("{"):
            pairs = pairwise(command)
            url = next(word for before, word in pairs if before != "-H" and re.match(r"http://|\$\w", word))
            url = re.sub(r"\$([A-Z]+)", lambda name: variables.get(name[1], "http://set.before"), url)
            method = command[command.index("-X") + 1] if "-X" in command else "POST"
            yield re.sub(r"^http://[^/]*|\?.*", "", url), method.lower(), json.loads(body)


def typescript(bodies: Iterable[Sent]) -> str:
    """Return a module with a constant for each body."""
    return HEAD + "".join(
        f'export const body{number}: Body<"{one.path}", "{one.method}"> = {json.dumps(one.body)};\n'
        for number, one in enumerate(bodies)
    )
