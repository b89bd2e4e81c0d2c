"""The audit trail, and the settings in force."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from headway.telemetry import names_a_secret, redact
from headway.views.jobs.items import masked
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway.config import Config, Value
    from headway.ledger import Ledger


class AuditEntry(NamedTuple):
    """One change of recorded work."""

    at: Annotated[datetime, "when"]
    actor: Annotated[str, "who"]
    action: Annotated[str, "what: reset, retry, forget, purge, ..."]
    job: Annotated[str, "the job's id; empty if it is about none"]
    detail: Annotated[Mapping[str, Any], "the facts of it"]


class Audit(NamedTuple):
    """`headway audit`: who changed recorded work, the oldest first."""

    audit: Annotated[tuple[AuditEntry, ...], "the changes"]

    def as_json(self) -> Json:
        return document(self)


class SettingView(NamedTuple):
    """One setting."""

    value: Annotated[Any, "its value; secrets are masked"]
    origin: Annotated[str, "where the value comes from"]
    help: Annotated[str, "what it is for"]


class Settings(NamedTuple):
    """`headway config`: the settings in force, by name."""

    settings: Annotated[Mapping[str, SettingView], "the settings"]

    def as_json(self) -> Json:
        return document(self)


def read_audit(ledger: Ledger, job: str | None = None) -> Audit:
    from headway.ledger.values import utc

    entries = ledger.audit_trail(job)
    return Audit(
        tuple(AuditEntry(utc(at), redact(who), what, name, facts(detail)) for at, who, what, name, detail in entries)
    )


def facts(text: str) -> dict[str, Any]:
    """Parse the details of an entry and mask secrets, because a reason is free text."""
    try:
        found = masked(json.loads(text))
    except ValueError:
        found = redact(text)
    return found if isinstance(found, dict) else {"detail": found}


def read_settings(config: Config) -> Settings:
    """Read every setting, with secrets masked."""
    return Settings(
        {
            option.name: SettingView(
                "***" if option.secret and found.value else shown(option.name, found.value), found.origin, option.help
            )
            for option, found in config.items()
        }
    )


def shown(name: str, value: Value) -> Value:
    """Return a setting's value with secrets masked. The path of a webhook is a secret too."""
    if isinstance(value, tuple):
        return tuple(str(shown(name, part)) for part in value)
    if not isinstance(value, str):
        return value
    if names_a_secret(name):
        return "***"
    if name == "sinks":
        return _names_of_sinks(value)
    if value.startswith(("http://", "https://")):
        return _host_only(value)
    return redact(value)


def _host_only(address: str) -> str:
    try:
        parts = urlsplit(address)
        return f"{parts.scheme}://{parts.hostname or ''}/***"
    except ValueError:  # an incomplete IPv6 address
        return "***"


def _names_of_sinks(addresses: str) -> str:
    """Return the names of sinks, which contain no secrets."""
    from headway.errors import HeadwayError
    from headway.events import open_sinks

    try:
        return ", ".join(sink.name for sink in open_sinks(addresses))
    except HeadwayError as error:
        return f"*** ({error})"
