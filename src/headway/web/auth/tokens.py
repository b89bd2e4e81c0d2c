"""Tokens and sessions in SQL. Only hashes of secrets are stored, so a copy of the database gives no access.

A token is ``hw_ID_SECRET``. Its secret has 256 random bits. A fast hash is enough, because guessing is not feasible.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from headway.core.ids import check_user_id
from headway.errors import InvalidInput, NotFound
from headway.ledger.store.audit import audit
from headway.ledger.values import maybe_utc, utc
from headway.views.system.access import Token, Tokens
from headway.web.site import RIGHTS, Role, User

if TYPE_CHECKING:
    from headway._sql import Database, Row, Tx

#: Lifetime of a session, in seconds.
SESSION: Final = 12 * 3600.0
#: Seconds for which ended sessions stay in the table, so that every server notices the end.
ENDED: Final = 3600.0
#: Seconds for which a ticket spent on a request is remembered: longer than a ticket is valid (`headway.web.auth.tickets`).
TICKET: Final = 600.0
#: Maximum lifetime of a token, in days.
MOST_DAYS: Final = 3650.0

#: Prefix of every token.
PREFIX: Final = "hw_"

_TOKEN = re.compile(r"hw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


#: Hash prefix of a ticket that was spent on a single request. No cookie has such a hash.
_SPENT: Final = "spent:"
_IS_SPENT: Final = f"(substr(hash, 1, {len(_SPENT)}) = '{_SPENT}')"


def hashed(secret: str) -> str:
    """Return the SHA-256 hash of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def create(database: Database, name: str, role: str, *, days: float | None = None, by: str) -> tuple[str, Token]:
    """Create a token and return it with its record. The token itself cannot be recovered later."""
    name = check_user_id(name, "a name")
    if role not in RIGHTS:
        raise InvalidInput(f"role must be {', '.join(RIGHTS)} (got {role!r}).")
    if days is not None and not 0 < days <= MOST_DAYS:
        raise InvalidInput(f"days must be above 0 and at most {MOST_DAYS:,.0f} (got {days:g}).")
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)

    def work(tx: Tx) -> float:
        now = tx.now()
        tx.execute(
            "INSERT INTO web_tokens (id, hash, name, role, created_at, created_by, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, hashed(secret), name, role, now, by, None if days is None else now + days * 86_400),
        )
        audit(tx, now, by, "token.create", "", {"token": id, "name": name, "role": role})
        return now

    now = database.run(work, operation="web.token")
    expires = maybe_utc(None if days is None else now + days * 86_400)
    return f"hw_{id}_{secret}", Token(id, name, role, utc(now), by, expires, None)


def listed(database: Database) -> Tokens:
    """Return all tokens, the oldest first."""
    rows = database.all(
        "SELECT id, name, role, created_at, created_by, expires_at, revoked_at FROM web_tokens ORDER BY created_at, id"
    )
    return Tokens(
        tuple(
            Token(id, name, role, utc(created), by, maybe_utc(expires), maybe_utc(revoked))
            for id, name, role, created, by, expires, revoked in rows
        )
    )


def revoke(database: Database, id: str, *, by: str) -> Token:
    """Revoke a token and end its sessions. A server's cache may accept it for a few more seconds."""

    def work(tx: Tx) -> None:
        now = tx.now()
        if not tx.execute("UPDATE web_tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL", (now, id)):
            if tx.one("SELECT 1 FROM web_tokens WHERE id = ?", (id,)) is None:
                raise NotFound(f"There is no token {id[:40]!r}.", hint="List them: headway token list")
            return
        tx.execute("DELETE FROM web_sessions WHERE token = ?", (id,))
        audit(tx, now, by, "token.revoke", "", {"token": id})

    database.run(work, operation="web.token")
    return next(token for token in listed(database).tokens if token.id == id)


class Pulse(NamedTuple):
    """Values that change whenever a token or session ends. Counts, because a clock may be set back."""

    #: Tokens ever created, including expired and revoked ones.
    made: int
    #: Tokens that were revoked or have expired.
    ended: int
    #: Sessions by token (logins) and by ticket (visits) that ended recently, and the latest end of each.
    logins: int
    last_login: float | None
    visits: int
    last_visit: float | None


def pulse(database: Database) -> Pulse:
    """Read the current `Pulse`."""
    with database.read() as tx:
        now = tx.now()
        row = tx.one(
            "SELECT count(*), coalesce(sum(CASE WHEN revoked_at IS NOT NULL OR expires_at <= ? THEN 1 ELSE 0 END), 0), "
            "(SELECT count(*) FROM web_sessions WHERE expires_at <= ?), "
            "(SELECT max(expires_at) FROM web_sessions WHERE expires_at <= ?), "
            f"(SELECT count(*) FROM web_visits WHERE expires_at <= ? AND NOT {_IS_SPENT}), "
            f"(SELECT max(expires_at) FROM web_visits WHERE expires_at <= ? AND NOT {_IS_SPENT}) FROM web_tokens",
            (now, now, now, now, now),
        )
    assert row is not None
    return Pulse(int(row[0]), int(row[1]), *row[2:])


_VALID = "t.revoked_at IS NULL AND (t.expires_at IS NULL OR t.expires_at > ?)"


def find(database: Database, text: str) -> tuple[User, str] | None:
    """Return the user of a token, and its id; None if it is malformed, unknown, expired or revoked."""
    parts = _TOKEN.fullmatch(text)
    if parts is None:
        return None
    with database.read() as tx:
        row = tx.one(
            f"SELECT t.hash, t.name, t.role FROM web_tokens t WHERE t.id = ? AND {_VALID}", (parts[1], tx.now())
        )
    if row is None or not hmac.compare_digest(str(row[0]), hashed(parts[2])):
        return None
    return _user(row[1:]), parts[1]


def open_session(database: Database, token: str, *, user: User) -> str:
    """Open a session by a token and return its cookie. Sessions that ended more than `ENDED` seconds ago are deleted."""
    cookie = secrets.token_urlsafe(32)

    def work(tx: Tx) -> None:
        now = tx.now()
        tx.execute("DELETE FROM web_sessions WHERE expires_at < ?", (now - ENDED,))
        tx.execute(
            "INSERT INTO web_sessions (hash, token, created_at, expires_at) VALUES (?, ?, ?, ?)",
            (hashed(cookie), token, now, now + SESSION),
        )
        audit(tx, now, user.name, "login", "", {"token": token})

    database.run(work, operation="web.session")
    return cookie


def open_visit(database: Database, ticket: str, user: User) -> str | None:
    """Open a session by a ticket and return its cookie; None if the ticket was used before."""
    cookie = secrets.token_urlsafe(32)
    return cookie if _use(database, ticket, user, hashed(cookie), SESSION, audited=True) else None


def spend(database: Database, ticket: str, user: User) -> bool:
    """Use a ticket for one request; False if it was used before."""
    return _use(database, ticket, user, f"{_SPENT}{secrets.token_hex(16)}", TICKET, audited=False)


def _use(database: Database, ticket: str, user: User, hash: str, seconds: float, *, audited: bool) -> bool:
    """Insert the row that marks a ticket as used. Rows outlive any ticket or link."""

    def work(tx: Tx) -> bool:
        now = tx.now()
        tx.execute(
            f"DELETE FROM web_visits WHERE expires_at < ? AND (created_at < ? OR {_IS_SPENT})",
            (now, now - SESSION - ENDED),
        )
        new = tx.execute(
            "INSERT INTO web_visits (ticket, hash, name, role, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (ticket) DO NOTHING",
            (ticket, hash, user.name, user.role, now, now + seconds),
        )
        if new and audited:
            audit(tx, now, user.name, "login", "", {"ticket": ticket, "role": user.role})
        # A retry after a lost reply finds its own row.
        return bool(tx.one("SELECT 1 FROM web_visits WHERE ticket = ? AND hash = ?", (ticket, hash)))

    return database.run(work, operation="web.session")


def find_session(database: Database, cookie: str) -> User | None:
    """Return the user of a session cookie; None if the session has ended."""
    with database.read() as tx:
        now = tx.now()
        row = tx.one(
            "SELECT t.name, t.role FROM web_sessions s JOIN web_tokens t ON t.id = s.token "
            f"WHERE s.hash = ? AND s.expires_at > ? AND {_VALID} "
            "UNION ALL SELECT name, role FROM web_visits WHERE hash = ? AND expires_at > ?",
            (hashed(cookie), now, now, hashed(cookie), now),
        )
    return None if row is None else _user(row)


def close_session(database: Database, cookie: str) -> None:
    """End a session. The row stays for `ENDED` seconds, so that the other servers notice."""

    def work(tx: Tx) -> None:
        now = tx.now()
        for table in ("web_sessions", "web_visits"):
            sql = f"UPDATE {table} SET expires_at = ? WHERE hash = ? AND expires_at > ?"
            tx.execute(sql, (now, hashed(cookie), now))

    database.run(work, operation="web.session")


def signing_key(database: Database) -> bytes:
    """Return the key that signs cookies and forms. All processes of the installation share it."""
    row = database.one("SELECT value FROM meta WHERE name = 'web_key'")
    if row is None:
        database.write(
            "INSERT INTO meta (name, value) VALUES ('web_key', ?) ON CONFLICT (name) DO NOTHING",
            (secrets.token_hex(32),), operation="web.key", idempotent=True,
        )  # fmt: skip
        row = database.one("SELECT value FROM meta WHERE name = 'web_key'")
        assert row is not None
    return bytes.fromhex(str(row[0]))


def _user(row: Row) -> User:
    role: Role = row[1]
    return User(str(row[0]), role)
