"""A ledger as people have it, and the command line in this process."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import headway.cli
from headway.ledger import Done, Failed, Job, Ledger, NewItem, describe

COMMAND = "headway run ads:make_ad --items products.jsonl --job ads"


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Answer]]:
    """`cli("jobs", "--json")`: run a command in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("headway")
    before = list(logger.handlers), logger.level

    def run(*arguments: str) -> Answer:
        code = headway.cli.invoke(list(arguments))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    yield run
    # A command that configures logging does so for its process, which goes on here: with a stream that is gone.
    logger.handlers[:], logger.level = before


def fetch(idx: int) -> None:
    raise TimeoutError(f"GET https://store.internal/docs/sku-{idx}.pdf timed out")


def parse(idx: int) -> None:
    json.loads("{")


def seed(ledger: Ledger, id: str = "ads", *, items: int = 60) -> Job:
    """A job that was interrupted: of 60 items 40 are done, 5 wait for a retry, 4 timed out for good, 2 are corrupt."""
    job = ledger.create(id)
    ledger.describe(
        job, function="ads:make_ad", source="products.jsonl", command=COMMAND, keyed_by="sku", max_retries=1
    )
    job.register(
        [
            NewItem(idx, json.dumps({"sku": f"sku-{idx}", "api_token": "hunter2-hunter2"}), f"sku-{idx}", idx)
            for idx in range(items)
        ]
    )
    job.seal("digest")
    hold = ledger.hold(job, {"workers": 2, "mode": "process", "retries": 1})
    job.record([Done(idx, seconds=0.25, worker="w2", meta='{"chars": 12}') for idx in range(40)], hold=hold)
    for idx in (*range(40, 44), *range(40, 44), *range(44, 46), *range(44, 46), *range(46, 51)):
        try:
            parse(idx) if idx in (44, 45) else fetch(idx)
        except (TimeoutError, ValueError) as error:
            job.record([Failed(idx, describe(error), seconds=0.5, worker="w1")], hold=hold)
    ledger.release(hold, "interrupted")
    return job


@pytest.fixture(scope="session")
def _seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeded") / "headway.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        seed(ledger)
    return path


@pytest.fixture
def ads(tmp_path: Path, _seeded: Path) -> Path:
    """The database headway.db in the working directory, with the job of `seed`."""
    path = tmp_path / "headway.db"
    shutil.copy(_seeded, path)
    return path


def every_command() -> dict[str, click.Command]:
    """``dead list`` and so on -> its command; groups too."""
    found: dict[str, click.Command] = {}

    def add(path: str, command: click.Command) -> None:
        found[path] = command
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                add(f"{path} {name}", inner)

    with headway.cli.headway.make_context("headway", ["jobs"]) as context:
        for name in headway.cli.COMMANDS:
            command = headway.cli.headway.get_command(context, name)
            assert command is not None
            add(name, command)
    return found


def takes(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)
