"""A server without simdjson, which is an extra, answers as a server with it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["simdjson"] = None
import httpx
from service.codecs import _parser
from tests.serving import serving

assert not _parser.IN_PARSER
with serving() as url, httpx.Client(base_url=url) as client:
    for dy, x in ([[1, 2]], [[0.5, "NaN"]]), ([1, True], [1, 1]), ([1, [2]], [1, 1]):
        answer = client.post("/v1/ops/ReluGrad", json={"dY": dy, "X": x})
        print(answer.status_code, answer.json().get("dX") or answer.json()["detail"])
"""


def test_a_server_without_simdjson_reads_lists_and_finds_mistakes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "200 {'dtype': 'float32', 'shape': [1, 2], 'data': [[1.0, 0.0]]}",
        '422 dY[1] is true, but must be a number in float64\'s range, "NaN", "Infinity" or "-Infinity"',
        '422 dY[1] is a list, but must be a number in float64\'s range, "NaN", "Infinity" or "-Infinity"',
    ], done.stderr
