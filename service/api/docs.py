"""`/docs`: the interactive documentation, which takes nothing from other hosts, and nothing else may."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline';"
    " style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""The page's script and its styles stand in it; an API key typed into it goes to this server only."""


def install(app: FastAPI) -> None:
    """Serve the page, and at `/` the way to it."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",  # paths of the page's, that hold behind a proxy with a prefix, too
        title=app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters={"validatorUrl": None},  # or another host would be asked about the schema
    )
    page.headers.update(_HEADERS)

    async def docs() -> Response:
        return page

    async def index() -> Response:
        return RedirectResponse("docs")

    app.add_api_route("/", index, include_in_schema=False)
    app.add_api_route("/docs", docs, include_in_schema=False)
    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))
