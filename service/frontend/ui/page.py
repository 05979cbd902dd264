"""The page at / and its files, from this folder, under a Content-Security-Policy. The page uses the service's API like any other client."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from service.errors import UnknownRoute

PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "cache-control": "no-cache",  # a browser asks whether its copy is still current, so an upgrade never mixes files
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


class Asset(NamedTuple):
    """A file of the page. tag: its ETag."""

    content: bytes
    media_type: str
    tag: str

    @classmethod
    def of(cls, content: bytes, media_type: str) -> Asset:
        return cls(content, media_type, f'"{sha256(content).hexdigest()[:32]}"')


def add_routes(router: APIRouter) -> None:
    """Add / and the files that the page loads."""
    assets = read_assets()

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return respond_asset(assets[PAGE], request)

    @router.get("/ui/{name}", include_in_schema=False)
    async def file(request: Request) -> Response:
        asset = assets.get(request.path_params["name"])
        if asset is None:
            raise UnknownRoute("no route has this path: see /docs")
        return respond_asset(asset, request)


def read_assets() -> dict[str, Asset]:
    """Return the files of this folder that a browser may load, by name."""
    found = {}
    for file in files(__package__).iterdir():
        media_type = MEDIA_TYPES.get(f".{file.name.rpartition('.')[2]}")
        if media_type is not None:
            found[file.name] = Asset.of(file.read_bytes(), media_type)
    return found


def respond_asset(asset: Asset, request: Request) -> Response:
    headers = {**HEADERS, "etag": asset.tag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.tag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
