"""``doctor``: check the store and its surroundings."""

from __future__ import annotations

from collections.abc import Iterable

import click

from headway import __version__
from headway.cli import database_option, json_option
from headway.cli.toolkit import open_reader, put, put_json
from headway.config import Config, is_server
from headway.errors import ConfigError
from headway.views.system.health import Finding, examine, health


def _findings(database: str | None) -> Iterable[Finding]:
    """Yield findings as they are made. A server sends all at once."""
    try:
        address = Config(cli={"database": database}).text("database")
    except ConfigError:
        address = ""  # `examine` reports it as a finding
    if not is_server(address):
        return examine(database, version=__version__)
    with open_reader(database) as reader:
        return reader.health().findings


@click.command()
@json_option
@database_option
def doctor(database: str | None, *, as_json: bool) -> int:
    """Check the store and its surroundings. Every line is ok, warn or fail; exit 1 if a check failed."""
    findings: list[Finding] = []
    for finding in _findings(database):
        findings.append(finding)
        if not as_json:
            put(f"{finding.verdict:<4}  {finding.check:<9} {finding.text}")
            if finding.hint:
                put(f"                {finding.hint}")
    found = health(findings)
    if as_json:
        put_json(found)
    return 0 if found.healthy else 1
