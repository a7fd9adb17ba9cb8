from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.codecs import _parser

PARSERS = ["simdjson", "orjson"] if _parser.IN_PARSER else ["orjson"]
"""The parsers that are installed. Every answer is the same with each."""


@pytest.fixture(scope="module", autouse=True, params=PARSERS)
def parser(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the codecs parse JSON with this parser."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "orjson":
            patch.setattr(_parser, "simdjson", None)
        yield request.param
