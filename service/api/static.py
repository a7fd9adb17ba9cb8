"""Static files: the page at `/`, and the interactive documentation at `/docs`. They load nothing from other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib.resources import files
from mimetypes import guess_type
from typing import Any

import orjson
import xxhash
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html

from service.api.buffers.preconditions import known_tag
from service.api.http.answer import JSON, Answer
from service.api.http.call import Call, CurrentCall
from service.api.http.routing import access
from service.errors import NotFound, shown

_PAGE = ("dashboard/page", "dashboard/page/vendor")
_DOCS = ("swagger_ui",)

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks with its tag each time: an upgrade changes all files at once
}
"""No script or style in the page itself runs, so that text from clients cannot become one."""

_DOCS_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
}
"""The page may run its inline script, but an API key in it goes only to this server."""

_TYPES = {".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript"}
"""Media types that must be right on every machine: `mimetypes` reads the machine's own table."""


def routes(schema: Callable[[], dict[str, Any]]) -> APIRouter:
    """Return the endpoints of both pages, of their files, and of the schema."""
    router = APIRouter(include_in_schema=False)
    text: Future[bytes | memoryview] | None = None  # all answers share these bytes
    page = get_swagger_ui_html(
        openapi_url="openapi.json",  # relative paths work behind a proxy with a prefix
        title="gradserve",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # else the page would send the schema to another host
    )

    @router.get("/")
    @access(label="page", open=True)
    async def index(call: CurrentCall) -> Answer:
        return _file(call, _PAGE, "index.html", _PAGE_HEADERS)

    @router.get("/page/{file}")
    @access(label="page", open=True)
    async def file_of_page(call: CurrentCall, file: str) -> Answer:
        return _file(call, _PAGE, file, _PAGE_HEADERS)

    @router.get("/docs")
    @access(label="page", open=True)
    async def docs(call: CurrentCall) -> Answer:
        return Answer([bytes(page.body)], "text/html; charset=utf-8", _DOCS_HEADERS)

    @router.get("/docs/{file}")
    @access(label="page", open=True)
    async def file_of_docs(call: CurrentCall, file: str) -> Answer:
        return _file(call, _DOCS, file, {})

    @router.get("/openapi.json")
    @access(label="page", open=True)
    async def openapi(call: CurrentCall) -> Answer:
        nonlocal text
        if text is None:  # a thread writes it once: it takes seconds, which other requests must not wait
            text = call.engine.pool.submit(lambda: orjson.dumps(schema()))
        return Answer([await asyncio.wrap_future(text)], JSON)

    return router


def _file(call: Call, folders: tuple[str, ...], name: str, headers: dict[str, str]) -> Answer:
    """Return the file of this name in one of the folders. Raises `NotFound`."""
    found = _files(folders).get(name)
    if found is None:
        raise NotFound(f"There is nothing at {shown(call.path)}; /docs lists all paths")
    content, media_type, etag = found
    fields = {**headers, "ETag": etag}
    return Answer(status=304, fields=fields) if known_tag(call, etag) else Answer([content], media_type, fields)


@cache
def _files(folders: tuple[str, ...]) -> dict[str, tuple[bytes, str, str]]:
    """Return the content, the media type and the tag of each file by its name."""
    places = map(files("service.api").joinpath, folders)
    contents = {path.name: path.read_bytes() for place in places for path in place.iterdir() if path.is_file()}
    return {name: (content, _type(name), _tag(content)) for name, content in contents.items()}


def _type(name: str) -> str:
    return _TYPES.get(name[name.rfind(".") :]) or guess_type(name)[0] or "text/plain"


def _tag(content: bytes) -> str:
    return f'"{xxhash.xxh3_64_hexdigest(content)}"'
