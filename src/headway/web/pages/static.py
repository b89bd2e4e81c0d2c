"""Style sheet and scripts, under names that contain a hash of their content: a browser may keep them for ever.

They are read once, when the application is made, and are packed for browsers that take gzip.
"""

from __future__ import annotations

import gzip
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FOR_EVER = "public, max-age=31536000, immutable"


class Asset(NamedTuple):
    """One file as it is sent."""

    type: str
    content: bytes
    packed: bytes


def _squeezed(content: bytes, kind: str) -> bytes:
    """Without indentation and comments, and a style sheet without line ends. Ours have no text that runs over several lines or
    contains what begins a comment after a space, so nothing else changes."""
    lines = (line.partition(b" // ")[0].strip() for line in content.splitlines())
    return (b"" if kind == "css" else b"\n").join(line for line in lines if line and not line.startswith(b"//"))


class Assets:
    """The files of the folder ``static``."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._assets: dict[str, Asset] = {}
        for file in files(__package__).joinpath("static").iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind not in _TYPES:
                continue
            content = _squeezed(file.read_bytes(), kind)
            name = f"{stem}.{sha256(content).hexdigest()[:12]}.{kind}"
            self._paths[file.name] = f"/static/{name}"
            self._assets[name] = Asset(_TYPES[kind], content, gzip.compress(content, 9, mtime=0))

    def path(self, name: str) -> str:
        """Where ``app.css`` is to be had."""
        return self._paths[name]

    async def serve(self, request: Request) -> Response:
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            return PlainTextResponse("There is no such file.\n", 404, {"cache-control": "no-store"})
        headers = {"cache-control": _FOR_EVER, "vary": "accept-encoding", "x-content-type-options": "nosniff"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, media_type=asset.type, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, media_type=asset.type, headers=headers)
