"""`/`: the page for people. It is made of static files, and loads nothing from other hosts."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from mimetypes import guess_type

import xxhash
from fastapi import APIRouter

from service.api.buffers.preconditions import known_tag
from service.api.http.answer import Answer
from service.api.http.call import Call, CurrentCall
from service.api.http.routing import access
from service.errors import NotFound, shown

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""No script or style in the page itself runs, so that text from clients cannot become one."""

_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {sources}" for name, sources in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks with its tag each time: an upgrade changes all files at once
}

_TYPES = {".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript"}
"""Media types that must be right on every machine: `mimetypes` reads the machine's own table."""

router = APIRouter(include_in_schema=False)


@router.get("/")
@access(open=True)
async def index(call: CurrentCall) -> Answer:
    return _answer(call, "index.html")


@router.get("/page/{file}")
@access(open=True)
async def file_of_page(call: CurrentCall, file: str) -> Answer:
    return _answer(call, file)


def _answer(call: Call, name: str) -> Answer:
    if name not in _files():
        raise NotFound(f"There is nothing at {shown(f'/page/{name}')}; /docs lists all paths")
    content, media_type, etag = _files()[name]
    fields = {**_HEADERS, "ETag": etag}
    if known_tag(call, etag):
        return Answer(status=304, fields=fields)
    return Answer([content], media_type, fields)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Return the content, the media type and the tag of each file by its name. Vendored files are beside the others."""
    place = files("service.api.dashboard").joinpath("page")
    found = [path for folder in (place, place / "vendor") for path in folder.iterdir() if path.is_file()]
    return {path.name: _described(path.name, path.read_bytes()) for path in found}


def _described(name: str, content: bytes) -> tuple[bytes, str, str]:
    suffix = name[name.rfind(".") :]
    media_type = _TYPES.get(suffix) or guess_type(name)[0] or "text/plain"
    return content, media_type, f'"{xxhash.xxh3_64_hexdigest(content)}"'
