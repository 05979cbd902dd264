"""The page at /docs: Swagger UI with the OpenAPI document, from this service alone, under a Content-Security-Policy."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

from service.errors import UnknownRoute
from service.frontend.ui.page import Asset, respond_asset

SCRIPT, STYLE, ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"
MEDIA_TYPES = {SCRIPT: "text/javascript; charset=utf-8", STYLE: "text/css; charset=utf-8", ICON: "image/png"}
_SCRIPT_BEGIN, _SCRIPT_END = b"<script>", b"</script>"


def add_routes(router: APIRouter) -> None:
    """Add /docs and the files that it loads."""
    page = bytes(
        get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="seqserve",
            swagger_js_url=f"/docs/{SCRIPT}",
            swagger_css_url=f"/docs/{STYLE}",
            swagger_favicon_url=f"/docs/{ICON}",
        ).body
    )
    headers = {
        "content-security-policy": _policy(page),
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
    }

    folder = files("fastapi_swagger.resources")
    # In memory: FileResponse answers requests for thousands of ranges of a file, and in its own words.
    assets = {name: Asset.of((folder / name).read_bytes(), media_type) for name, media_type in MEDIA_TYPES.items()}

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @router.get("/docs/{name}", include_in_schema=False)
    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            raise UnknownRoute("no route has this path: see /docs")
        return respond_asset(assets[name], request)


def _policy(page: bytes) -> str:
    """Return a policy that allows the files of this service and the one script in the page. Swagger UI sets styles on its elements."""
    script = page.partition(_SCRIPT_BEGIN)[2].partition(_SCRIPT_END)[0]
    digest = b64encode(sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
