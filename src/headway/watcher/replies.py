"""Replies of Redis as they come, made typed values or refused. What a job contains is anybody's and refuses nothing: a value
that makes no sense counts as absent."""

from __future__ import annotations

from math import isfinite

from headway.errors import ServerRefused
from headway.telemetry import redact
from headway.watcher.ports import Member

Word = str | int | float | bytes


def word(said: Word) -> Word:
    """A name may consist of any bytes; `text` and this one keep them."""
    return said.encode("utf-8", "surrogateescape") if isinstance(said, str) else said


def text(reply: object) -> str:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "surrogateescape")
    if isinstance(reply, str):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} where a text belongs.")


def number(reply: object) -> float:
    try:
        if isinstance(reply, bytes | str | int | float):
            return float(reply)
    except ValueError:
        pass
    raise ServerRefused(f"Redis answered {redact(repr(reply))[:80]} where a number belongs.")


def items(reply: object) -> list[object]:
    if isinstance(reply, list):
        return reply
    raise ServerRefused(f"Redis answered {type(reply).__name__} where a list belongs.")


def members(reply: object) -> list[Member]:
    flat = items(reply)
    return [(text(member), number(score)) for member, score in zip(flat[0::2], flat[1::2], strict=True)]


def values(reply: object, count: int) -> list[bytes]:
    """The values of an HMGET; a key of another type has none."""
    found = reply if isinstance(reply, list) else [None] * count
    return [value if isinstance(value, bytes) else b"" for value in found]


def entries(reply: object) -> list[object]:
    return reply if isinstance(reply, list) else []


def seconds(value: object) -> float | None:
    """A number that a stranger wrote; None when it is none."""
    try:
        found = float(value) if isinstance(value, bytes) else float("nan")
    except ValueError:
        return None
    return found if isfinite(found) else None
