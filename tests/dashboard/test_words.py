"""The words of the page are those of `gradserve-client`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gradserve_client._cli import output as client
from gradserve_client.models import BufferInfo
from playwright.sync_api import Page

from tests.dashboard.conftest import Open

INFO: dict[str, Any] = {
    "name": "layer.weight",
    "shape": [30000, 256],
    "dtype": "float32",
    "nonfinite": "allow",
    "quorum": 8,
    "keep": 3,
    "ttl_seconds": None,
    "deadline_seconds": 30.0,
    "min_count": 2,
    "quorum_weight": 64.0,
    "contributors": [f"rank{rank}" for rank in range(8)],
    "per_contributor": 2,
    "max_norm": 1e6,
    "step": 4,
    "version": 36,
    "count": 3,
    "weight": 32.5,
    "bytes": 30_720_000,
    "closed_steps": [1, 2, 3],
    "created_at": 1_700_000_000.25,
    "updated_at": 1_700_000_100.75,
    "expires_at": 1_700_001_000.0,
    "deadline_at": 1_700_000_130.0,
    "contributors_in": {"rank0": 1, "rank1": 2},
    "missing": [f"rank{rank}" for rank in range(2, 8)],
}
"""A buffer with every rule."""

PLAIN = dict.fromkeys(
    ("quorum", "deadline_seconds", "quorum_weight", "contributors", "max_norm", "expires_at", "deadline_at", "missing")
)
"""The members of a buffer that are null without rules."""


@pytest.fixture(scope="module")
def numbers() -> list[float]:
    random = np.random.default_rng(0)
    powers = 10.0 ** random.integers(-9, 12, 200)
    return [0.0, 1.0, -1.0, 0.5, 999.5, 999999.5, 1e6, 1e-4, 9.9999e-5, 1e22, *(random.normal(size=200) * powers)]


@pytest.fixture
def time_zone() -> Iterator[str]:
    """Set the time zone of this process, as the client has it. Yield the name of the same zone in a browser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "IST-5:30")
        time.tzset()
        yield "Asia/Kolkata"
    time.tzset()


def words(page: Page, name: str, *arguments: Any) -> Any:
    program = "async ([name, ...given]) => (await import('./page/words.js'))[name](...given)"
    return page.evaluate(program, [name, *arguments])


def test_the_words_are_those_of_the_client(
    open_page: Open, server: str, numbers: list[float], time_zone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = open_page(server, timezone_id=time_zone)
    program = "async (all) => { const { general } = await import('./page/words.js'); return all.map(EACH); }"
    each = "(number) => [general(number), general(number, 4)]"
    written = page.evaluate(program.replace("EACH", each), numbers)
    assert written == [[f"{number:g}", f"{number:.4g}"] for number in numbers]
    sizes = [0, 999, 1000, 999_499, 999_500, 30_720_000, 5 * 10**9, 10**15]
    assert [words(page, "size", size) for size in sizes] == [client.size(size) for size in sizes]
    for info in (
        INFO,
        INFO | PLAIN | {"per_contributor": 10**9},
        INFO | {"missing": [], "contributors_in": {}, "closed_steps": []},
    ):
        known = BufferInfo.of(info)
        assert words(page, "count", info) == client.count(known)
        assert words(page, "missing", info["missing"] or []) == client.late(known)[1]
        client.print_info(known)
        printed = [re.split(r"  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert words(page, "fields", info) == printed
