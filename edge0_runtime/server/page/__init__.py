"""The page at /: chat, and beside it what the engine does. Static files of this folder, no build step, nothing from elsewhere.

index.html style.css  what is there and how it looks
app.js                wires the rest
api.js settings.js    requests, the API key, server-sent events; the fields of a request
conversation.js chat.js markdown.js   turns; how they are shown; Markdown as DOM nodes, never as HTML
engine.js heatmap.js  the live panel
dom.js format.js      helpers
vendor/               marked (MIT), as published; of it only the lexer is used
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Whatever a model writes into the page: no script but ours, nobody else's host, and no string that becomes HTML or code.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # "no-referrer" could make the Origin of the page's own requests "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def router() -> APIRouter:
    """The page and its files, read once."""
    folder = Path(__file__).parent
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in TYPES}
    contents = {name: (path.read_bytes(), TYPES[path.suffix]) for name, path in files.items()}
    routes = APIRouter()

    @routes.get("/")
    async def page() -> Response:
        return _response(*contents["index.html"])

    @routes.get("/page/{name:path}")
    async def file(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        return _response(*contents[name])

    return routes


def _response(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=HEADERS)
