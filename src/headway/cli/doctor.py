"""``doctor``: looks at the store and its surroundings and says what is well and what is not."""

from __future__ import annotations

import click

from headway import __version__
from headway.cli import database_option, json_option
from headway.cli.toolkit import put, put_json
from headway.views.health import Finding, examine, health


@click.command()
@json_option
@database_option
def doctor(database: str | None, *, as_json: bool) -> int:
    """Check the store and its surroundings. Every line is ok, warn or fail; exit 1 if one failed."""
    findings: list[Finding] = []
    for finding in examine(database, version=__version__):
        findings.append(finding)
        if not as_json:
            put(f"{finding.verdict:<4}  {finding.check:<9} {finding.text}")
            if finding.hint:
                put(f"                {finding.hint}")
    found = health(findings)
    if as_json:
        put_json(found)
    return 0 if found.healthy else 1
