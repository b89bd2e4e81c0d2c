"""Reading and registering many items: it can be interrupted, shows how far it is, and the same command continues."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headway
from headway.core.lifecycle import Shutdown
from headway.errors import Stopping
from headway.ledger import JobInfo, Ledger
from headway.run import items
from headway.run.items import FileItems, GivenItems, WatchedItems
from tests.services.waiting import eventually

Spawn = Callable[..., "subprocess.Popen[str]"]
COUNT = 100_000


def job_in(place: Path) -> JobInfo | None:
    file = place / "headway.db"
    if not file.exists():
        return None
    with Ledger.open(f"sqlite:///{file}", create=False) as ledger:
        return next(iter(ledger.jobs()), None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_interrupts_the_registration_and_a_later_run_registers_the_rest(
    tmp_path: Path, spawn_cli: Spawn, number: int, code: int
):
    (tmp_path / "items.txt").write_text("".join(f"{n}\n" for n in range(COUNT)))
    command = ("run", "-i", "items.txt", "-j", "ads", "--max-failures", "1", "--retries", "0", "--", "false", "{}")
    run = spawn_cli(*command)
    eventually(lambda: (info := job_in(tmp_path)) is not None and info.total > 0)
    run.send_signal(number)
    _, said = run.communicate(timeout=60)
    assert run.returncode == code, said
    assert "Interrupted after" in said
    assert "The same command continues" in said
    info = job_in(tmp_path)
    assert info is not None
    assert 0 < info.total < COUNT
    assert (info.sealed, info.held, info.done, info.failures) == (False, False, 0, 0)
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        assert [run.outcome for run in ledger.job("ads").runs()] == ["interrupted"]
    again = spawn_cli(*command)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 4, said
    info = job_in(tmp_path)
    assert info is not None
    assert (info.total, info.sealed) == (COUNT, True)


class Interrupts(list[int]):
    """Items of which one, when it is read for the second time, is the moment of Ctrl-C."""

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            if item == 6000:
                self.seen = getattr(self, "seen", 0) + 1
                if self.seen == 2:
                    os.kill(os.getpid(), signal.SIGINT)
            yield item


def test_ctrl_c_in_map_interrupts_the_registration(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    with pytest.raises(KeyboardInterrupt):
        headway.map(str, Interrupts(range(100_000)), job="ads", database=url, progress="none")
    info = job_in(tmp_path)
    assert info is not None
    assert info.total < 100_000
    assert (info.sealed, info.held, info.done) == (False, False, 0)


def test_reading_shows_how_many_items_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(items, "REPORT_SECONDS", 0.0)
    (tmp_path / "items.txt").write_text("".join(f"{n}\n" for n in range(2500)))
    said: list[str] = []
    read = list(WatchedItems(FileItems(tmp_path / "items.txt"), Shutdown(), said.append))
    assert [each.payload for each in read[:2]] == ['"0"', '"1"']
    assert said == [f"Reading items: {count:,} so far ..." for count in (1000, 2000)]


def test_comparing_given_items_with_a_known_job_can_be_interrupted():
    shutdown = Shutdown()
    watched = WatchedItems(GivenItems([1, 2, 3]), shutdown, print)
    assert watched.digest() == GivenItems([1, 2, 3]).digest()
    shutdown.request(signal.SIGTERM)
    with pytest.raises(Stopping):
        watched.digest()
