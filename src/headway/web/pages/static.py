"""Style sheets and scripts, under names with a hash of their content, so that browsers cache them forever.

They are read and compressed once, when the application is created.
"""

from __future__ import annotations

import gzip
import re
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
#: In a script: a literal (string, template or regular expression), or an operator with the spaces around it.
_TOKEN = re.compile(
    rb"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"""
    rb"""|(?<=[(,=:\[!&|?\s])/(?![ /*])(?:\\.|\[[^\]]*\]|[^/\\\n])+/)"""
    rb"""|/\*.*?\*/|[ ]*([{}()=,;:?&|<>*\[\]]+)[ ]*"""
)
_FOR_EVER = "public, max-age=31536000, immutable"


class Asset(NamedTuple):
    """One file, plain and compressed with gzip."""

    type: str
    content: bytes
    packed: bytes


def _minified(content: bytes, kind: str) -> bytes:
    """Remove indentation and comments, in scripts spaces around operators, and in style sheets line ends.

    This is safe because our files have no multi-line strings, no `` // `` within a string and no nested templates.
    """
    lines = (line.partition(b" // ")[0].strip() for line in content.splitlines())
    joined = (b"" if kind == "css" else b"\n").join(line for line in lines if line and not line.startswith(b"//"))
    if kind == "css":
        return joined
    return re.sub(rb"(?<=[;{,(])\n", b"", _TOKEN.sub(lambda found: found[1] or found[2] or b"", joined))


class Assets:
    """The files of the folder ``static``."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._assets: dict[str, Asset] = {}
        for file in files(__package__).joinpath("static").iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind not in _TYPES:
                continue
            content = _minified(file.read_bytes(), kind)
            name = f"{stem}.{sha256(content).hexdigest()[:8]}.{kind}"
            self._paths[file.name] = f"/static/{name}"
            self._assets[name] = Asset(_TYPES[kind], content, gzip.compress(content, 9, mtime=0))

    def path(self, name: str) -> str:
        """Return the path of a file, such as ``app.css``, with its hash."""
        return self._paths[name]

    async def serve(self, request: Request) -> Response:
        """Answer ``/static/NAME``."""
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            return PlainTextResponse("There is no such file.\n", 404, {"cache-control": "no-store"})
        headers = {"cache-control": _FOR_EVER, "vary": "accept-encoding", "x-content-type-options": "nosniff"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.packed, media_type=asset.type, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, media_type=asset.type, headers=headers)
