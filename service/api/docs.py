"""`/docs`: the interactive documentation. Its page loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from mimetypes import guess_type
from typing import Any

import orjson
import xxhash
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html

from service.api.buffers.preconditions import known_tag
from service.api.http.answer import JSON, Answer
from service.api.http.call import CurrentCall
from service.api.http.routing import access
from service.errors import NotFound, shown

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""The page may run its inline script, but an API key in it goes only to this server."""


def routes(schema: Callable[[], dict[str, Any]]) -> APIRouter:
    """Return the endpoints of the page, its files and the schema."""
    router = APIRouter(include_in_schema=False)
    text = cache(lambda: orjson.dumps(schema()))  # all answers share these bytes
    page = get_swagger_ui_html(
        openapi_url="openapi.json",  # relative paths work behind a proxy with a prefix
        title="gradserve",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the page would send the schema to another host
    )

    @router.get("/docs")
    @access(open=True)
    async def docs(call: CurrentCall) -> Answer:
        return Answer([bytes(page.body)], "text/html; charset=utf-8", _HEADERS)

    @router.get("/docs/{file}")
    @access(open=True)
    async def file_of_docs(call: CurrentCall, file: str) -> Answer:
        content, etag = _file(file)
        if known_tag(call, etag):
            return Answer(status=304, fields={"ETag": etag})
        return Answer([content], guess_type(file)[0] or "text/plain", {"ETag": etag})

    @router.get("/openapi.json")
    @access(open=True)
    async def openapi(call: CurrentCall) -> Answer:
        return Answer([text()], JSON)

    return router


def _resources() -> Iterator[Traversable]:
    return files("service.api").joinpath("swagger_ui").iterdir()


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    contents = {path.name: path.read_bytes() for path in _resources() if path.is_file()}
    return {name: (content, f'"{xxhash.xxh3_64_hexdigest(content)}"') for name, content in contents.items()}


def _file(name: str) -> tuple[bytes, str]:
    if name not in _files():
        raise NotFound(f"There is nothing at {shown(f'/docs/{name}')}; /docs lists all paths")
    return _files()[name]
