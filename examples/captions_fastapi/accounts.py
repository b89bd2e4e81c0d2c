"""Who may use the shop, and how a request shows who sent it."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from typing import Literal

from jwt_tokens import issue, subject
from starlette.requests import HTTPConnection

SECRET = os.environ["SHOP_SECRET"]
COOKIE = "captions"


@dataclass(frozen=True)
class Account:
    """``id`` is the user id of the account's tasks: an e-mail address, or the number of a customer."""

    id: int | str
    role: Literal["user", "viewer", "admin"]
    password: str  # a real application stores a hash


ACCOUNTS = {
    "anna@example.org": Account("anna@example.org", "user", "anna's password"),
    "carla@example.org": Account("carla@example.org", "user", "carla's password"),
    "bert": Account(7, "user", "bert's password"),
    "dora": Account(8, "user", "dora's password"),
    "vera": Account("vera@example.org", "viewer", "vera's password"),
    "root": Account("root@example.org", "admin", "root's password"),
}


def log_in(name: str, password: str) -> str | None:
    """Return a token for an account, or None if the password is wrong."""
    account = ACCOUNTS.get(name)
    if account is None or not hmac.compare_digest(account.password.encode(), password.encode()):
        return None
    return issue(name, secret=SECRET)


def account_of(connection: HTTPConnection, *, cookie: bool = False) -> Account | None:
    """Return who sent a request, by its Bearer token or, where a browser opens it, by the cookie of the login."""
    kind, _, token = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        token = connection.cookies.get(COOKIE, "") if cookie else ""
    name = subject(token, secret=SECRET)
    return None if name is None else ACCOUNTS.get(name)
