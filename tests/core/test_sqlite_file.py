"""A SQLite file that is damaged, foreign, unreachable or out of room: a clear error, and the file as it was."""

import contextlib
import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway._sql import connect, sqlite_file
from headway._sql.sqlite import LOOK_SECONDS
from headway.errors import (
    HeadwayError,
    NotFound,
    StorageError,
    StoreCorrupt,
    StoreForeign,
    StoreReadOnly,
)
from headway.ledger import Done, Failed, Failure, Ledger, NewItem, canonical, fingerprint
from tests.core.databases import digest, exit_code, forked, sqlite_url

PAGE = 4096


def make(path: Path, *, items: int = 40) -> Path:
    """A small ledger with something in every place."""
    with Ledger.open(sqlite_url(path)) as ledger:
        job = ledger.create("ads")
        texts = [canonical({"sku": f"S-{n}", "words": "payload " * 5}) for n in range(items)]
        job.register([NewItem(n, text, f"key-{n}", fingerprint(text)) for n, text in enumerate(texts)])
        job.seal()
        job.record([Done(n, canonical({"ad": f"meta {n} " * 5})) for n in range(items // 2)])
        job.record(
            [Failed(n, Failure("ValueError", f"broken {n}", "jobs.py:make")) for n in range(items // 2, items * 3 // 4)]
        )
    return path


def killed(path: Path) -> Path:
    """The same, left by a process that was killed: its last writes are in the -wal."""
    code = "import os, sys; from pathlib import Path; from tests.core.test_sqlite_file import make, write; "
    code += "make(Path(sys.argv[1])); kept = write(Path(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert Path(f"{path}-wal").stat().st_size > 0
    return path


def write(path: Path) -> Ledger:
    ledger = Ledger.open(sqlite_url(path))
    ledger.job("ads").record([Done(n) for n in range(30, 40)])
    return ledger


def damage(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def refused(path: Path, kind: type[HeadwayError]) -> HeadwayError:
    """Opening it, to write or to read, is this error; the file stays what it was."""
    before = digest(path) if path.is_file() else ""
    caught: list[HeadwayError] = []
    for create in (True, False):
        with pytest.raises(StorageError) as info:
            connect(sqlite_url(path), create=create)
        caught.append(info.value)
    assert [type(error) for error in caught] == [kind, kind]
    assert str(path) in str(caught[0])
    assert caught[0].hint
    assert caught[0].exit_code == 1
    assert (digest(path) if path.is_file() else "") == before
    return caught[0]


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-29")
def test_a_file_of_no_bytes_is_a_lost_database_and_not_a_new_one(tmp_path: Path):
    path = tmp_path / "a.db"
    path.touch()
    assert "0 bytes" in str(refused(path, StoreCorrupt))


@pytest.mark.req("S3-29")
@pytest.mark.parametrize("keep", [1, 50, 99, 100, PAGE - 1, PAGE, 3 * PAGE, 0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, keep):
    path = make(tmp_path / "a.db")
    os.truncate(path, int(keep * path.stat().st_size) if isinstance(keep, float) else keep)
    refused(path, StoreCorrupt)


@pytest.mark.req("S3-29")
@pytest.mark.parametrize(
    ("offset", "content"), [(0, b"GARBAGE!" * 16), (0, b"\0" * 100), (16, b"\xff\xff"), (100, b"\xff" * 200), (8, b"4")]
)
def test_a_damaged_header_is_refused(tmp_path: Path, offset: int, content: bytes):
    path = make(tmp_path / "a.db")
    damage(path, offset, content)
    refused(path, StoreCorrupt)


@pytest.mark.req("S3-29")
def test_a_zeroed_page_is_found_by_verify(tmp_path: Path):
    path = make(tmp_path / "a.db", items=400)
    pages = path.stat().st_size // PAGE
    found = []
    for page in range(2, pages + 1):
        copy = Path(shutil.copy(path, tmp_path / "copy.db"))
        damage(copy, (page - 1) * PAGE, b"\0" * PAGE)
        before = digest(copy)
        try:
            with connect(sqlite_url(copy)) as database:
                database.verify()
        except StoreCorrupt as error:
            found += [page] if str(copy) in str(error) else []
        assert digest(copy) == before
    assert found == list(range(2, pages + 1))


@pytest.mark.req("S3-29")
def test_a_database_of_another_program_is_refused(tmp_path: Path):
    path = tmp_path / "theirs.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE meta (name, value)")
        connection.commit()
    assert "another program" in str(refused(path, StoreForeign))


@pytest.mark.req("S3-29")
def test_a_directory_or_a_pipe_is_refused(tmp_path: Path):
    refused(tmp_path, StoreForeign)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", StoreForeign)


@pytest.mark.req("S3-29")
def test_a_text_file_is_refused(tmp_path: Path):
    path = tmp_path / "notes.db"
    path.write_text("Dear diary, today I named a text file .db. " * 10)
    refused(path, StoreCorrupt)


@pytest.mark.req("S3-29")
def test_a_wal_of_another_headway_database_is_refused_and_never_copied_in(tmp_path: Path):
    path, other = make(tmp_path / "a.db"), killed(tmp_path / "other.db")
    wal = Path(f"{path}-wal")
    shutil.copy(f"{other}-wal", wal)
    before = digest(wal)
    error = refused(path, StoreCorrupt)
    assert "belongs to another database" in str(error)
    assert str(wal) in str(error)
    assert digest(wal) == before
    wal.unlink()
    Path(f"{path}-shm").unlink()
    with Ledger.open(sqlite_url(path)) as ledger:
        assert ledger.job("ads").info().done == 20
        ledger.database.verify()


LATER = """
import os, sys
from headway.ledger import Done, Ledger, NewItem
ledger = Ledger.open(sys.argv[1])
job = ledger.create("later")
job.register([NewItem(n, '"' + "x" * 400 + '"', f"k{n}") for n in range(800)])
for n in range(800):  # so much that the log is copied into the file, and begins anew
    job.record([Done(n, '"' + "y" * 100 + '"')])
os._exit(0)  # as if it were killed: its log stays
"""


@pytest.mark.req("S3-29")
@pytest.mark.parametrize("how", ["copied", "vacuumed"])
def test_a_backup_restored_over_the_log_of_its_later_life_is_refused_and_not_harmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    monkeypatch.setattr(sqlite_file, "OVERLAID_SECONDS", 0.05)
    path, backup = make(tmp_path / "a.db"), tmp_path / "backup.db"
    if how == "copied":
        shutil.copy(path, backup)
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(backup),))
    subprocess.run([sys.executable, "-c", LATER, sqlite_url(path)], check=True)
    wal = Path(f"{path}-wal")
    assert wal.stat().st_size > 0
    time.sleep(0.1)  # a person restores it
    shutil.copy(backup, path)
    before = digest(wal)
    assert "before it was restored" in str(refused(path, StoreCorrupt))
    assert digest(wal) == before
    wal.unlink()
    Path(f"{path}-shm").unlink()
    with Ledger.open(sqlite_url(path)) as ledger:
        assert [info.id for info in ledger.jobs()] == ["ads"]
        ledger.database.verify()


@pytest.mark.req("S3-22")
def test_an_older_log_that_fits_is_used_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sqlite_file, "OVERLAID_SECONDS", 0.05)
    path = killed(tmp_path / "a.db")
    time.sleep(0.1)
    path.chmod(0o400)
    path.chmod(0o600)
    with Ledger.open(sqlite_url(path)) as ledger:
        assert ledger.job("ads").info().done == 30
    assert caplog.text.count("if the database is a restored backup") == 1
    with Ledger.open(sqlite_url(path)):
        pass
    assert caplog.text.count("if the database is a restored backup") == 1  # what it held is in the file, and it is gone


@pytest.mark.req("S3-29")
def test_a_log_that_undoes_a_restore_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It cannot be told from a log that is the file's own, which must be used."""
    monkeypatch.setattr(sqlite_file, "OVERLAID_SECONDS", 0.05)
    path, backup = killed(tmp_path / "a.db"), tmp_path / "backup.db"
    shutil.copy(path, backup)  # the file alone: what was done since is in the log
    time.sleep(0.1)
    shutil.copy(backup, path)
    with Ledger.open(sqlite_url(path)) as ledger:
        assert ledger.job("ads").info().done == 30
    assert "if the database is a restored backup" in caplog.text


@pytest.mark.req("S3-29")
def test_a_wal_of_a_foreign_database_does_no_harm(tmp_path: Path):
    path = make(tmp_path / "a.db")
    foreign = sqlite3.connect(tmp_path / "theirs.db")
    foreign.execute("PRAGMA journal_mode = WAL")
    foreign.execute("CREATE TABLE t (x)")
    foreign.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 100)
    foreign.commit()
    shutil.copy(tmp_path / "theirs.db-wal", f"{path}-wal")
    foreign.close()
    refused(path, StoreCorrupt)


@pytest.mark.req("S3-29")
def test_a_wal_of_garbage_is_ignored_as_sqlite_does(tmp_path: Path):
    path = make(tmp_path / "a.db")
    Path(f"{path}-wal").write_bytes(random.Random(1).randbytes(50_000))
    with Ledger.open(sqlite_url(path)) as ledger:
        assert ledger.job("ads").info().done == 20


@pytest.mark.req("S3-22")
def test_after_a_kill_opening_is_enough(tmp_path: Path):
    path = killed(tmp_path / "a.db")
    with Ledger.open(sqlite_url(path)) as ledger:
        info = ledger.job("ads").info()
        assert (info.done, info.failed) == (30, 10)
        ledger.database.verify()


@pytest.mark.req("S3-22")
def test_a_wal_cut_short_loses_the_last_transactions_whole_and_nothing_else(tmp_path: Path):
    """As after a power cut: never a part of a transaction."""
    path = killed(tmp_path / "a.db")
    whole = Path(f"{path}-wal").read_bytes()
    outcomes = set()
    for length in range(0, len(whole) + 1, max(1, len(whole) // 25)):
        copy = tmp_path / f"{length}.db"
        shutil.copy(path, copy)
        Path(f"{copy}-wal").write_bytes(whole[:length])
        with Ledger.open(sqlite_url(copy)) as ledger:
            info = ledger.job("ads").info()
            outcomes.add((info.done, info.failed))
            ledger.database.verify()
    assert outcomes <= {(20, 10), (30, 10)}


# ---- rights ---------------------------------------------------------------------------------------------------------


def as_nobody(work: Callable[[], object]) -> None:
    """Run it in a child that root's powers do not reach; where we are nobody special already, as we are."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    assert exit_code(forked(child)) == 0


@pytest.fixture
def reachable(tmp_path: Path) -> Iterator[Path]:
    """A directory that belongs to the user `as_nobody` becomes."""
    with tempfile.TemporaryDirectory(prefix="headway-nobody-") as name:
        path = Path(name)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        yield path
        path.chmod(0o700)


@pytest.mark.req("S3-29")
def test_a_file_that_may_not_be_written_is_refused_and_left_as_it_is(reachable: Path):
    path = reachable / "a.db"

    def work() -> None:
        make(path)
        path.chmod(0o400)
        before = digest(path)
        with pytest.raises(StoreReadOnly) as caught:
            connect(sqlite_url(path))
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 1
        assert digest(path) == before
        with Ledger.open(sqlite_url(path), create=False) as ledger:  # reading needs no right to write
            assert ledger.job("ads").info().done == 20
            with pytest.raises(StoreReadOnly):
                ledger.job("ads").record([Done(39)])
        path.chmod(0o600)
        with Ledger.open(sqlite_url(path)) as ledger:
            ledger.job("ads").record([Done(39)])

    as_nobody(work)


@pytest.mark.req("S3-29")
def test_where_nothing_may_be_written_a_database_is_read_and_nothing_is_left_there(reachable: Path):
    """As on a read-only mount: SQLite cannot make the files that it puts beside a database."""
    place = reachable / "a b#c"
    path = place / "a.db"

    def work() -> None:
        place.mkdir()
        make(path)
        place.chmod(0o500)
        with Ledger.open(sqlite_url(path), create=False) as ledger:
            assert ledger.job("ads").info().done == 20
            ledger.database.verify()
            with pytest.raises(StoreReadOnly):
                ledger.job("ads").record([Done(39)])
            assert os.listdir(place) == ["a.db"]
            seen = [ledger.job("ads").info().done]
            place.chmod(0o700)
            with Ledger.open(sqlite_url(path)) as other:  # by another way to the same file
                other.job("ads").record([Done(39)])
                place.chmod(0o500)
                time.sleep(2 * LOOK_SECONDS)
                seen.append(ledger.job("ads").info().done)
                place.chmod(0o700)
            place.chmod(0o500)
            time.sleep(2 * LOOK_SECONDS)
            seen.append(ledger.job("ads").info().done)
            assert seen == [20, 21, 21]

    as_nobody(work)


@pytest.mark.req("S3-29")
def test_by_a_link_from_where_nothing_may_be_written_a_database_is_read_and_written_as_it_is_now(reachable: Path):
    """SQLite's log lies beside the file, not beside the link: what is only in the log is not to be missed."""
    path, link = reachable / "a.db", reachable / "settings" / "a.db"

    def work() -> None:
        make(path)
        link.parent.mkdir()
        link.symlink_to(path)
        link.parent.chmod(0o500)
        with Ledger.open(sqlite_url(path)) as writer:
            writer.job("ads").record([Done(39)])
            with Ledger.open(sqlite_url(link), create=False) as reader:
                assert reader.job("ads").info().done == 21
            with Ledger.open(sqlite_url(link)) as other:
                other.job("ads").record([Done(38)])
            assert writer.job("ads").info().done == 22
        link.parent.chmod(0o700)

    as_nobody(work)


def test_by_a_link_that_was_made_before_the_database_the_first_run_makes_it_where_the_link_leads(tmp_path: Path):
    (tmp_path / "volume").mkdir()
    link = tmp_path / "headway.db"
    link.symlink_to(tmp_path / "volume" / "headway.db")
    with pytest.raises(NotFound, match="There is no database"):
        Ledger.open(sqlite_url(link), create=False)
    Ledger.open(sqlite_url(link)).close()
    assert link.is_symlink()
    assert (tmp_path / "volume" / "headway.db").is_file()


def test_by_a_link_a_log_that_was_removed_under_a_writer_is_noticed_too(tmp_path: Path):
    make(tmp_path / "a.db")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "b.db"
    link.symlink_to(tmp_path / "a.db")
    with Ledger.open(sqlite_url(link)) as ledger:
        ledger.job("ads").record([Done(39)])
        (tmp_path / "a.db-wal").unlink()
        time.sleep(2 * LOOK_SECONDS)
        with pytest.raises(StorageError, match="was deleted, moved or replaced"):
            ledger.job("ads").record([Done(38)])


@pytest.mark.req("S3-29")
def test_a_log_that_cannot_be_read_where_nothing_may_be_written_is_one_clear_error(reachable: Path):
    path = reachable / "inner" / "a.db"

    def be_killed() -> None:
        make(path)
        _kept = write(path)
        os._exit(0)

    def work() -> None:
        path.parent.mkdir()
        assert exit_code(forked(be_killed)) == 0
        Path(f"{path}-shm").unlink()
        path.parent.chmod(0o500)
        with pytest.raises(StoreReadOnly, match=r"a\.db-wal") as caught:
            Ledger.open(sqlite_url(path), create=False)
        assert "Copy both files" in (caught.value.hint or "")

    as_nobody(work)


@pytest.mark.req("S3-29")
def test_a_directory_that_may_not_be_written_or_entered_is_a_clear_error(reachable: Path):
    path = reachable / "inner" / "a.db"

    def work() -> None:
        path.parent.mkdir()
        for mode in (0o500, 0o000):
            path.parent.chmod(mode)
            with pytest.raises(StoreReadOnly) as caught:
                connect(sqlite_url(path))
            assert str(path) in str(caught.value)
            path.parent.chmod(0o700)
            assert list(path.parent.iterdir()) == []
        connect(sqlite_url(path)).close()

    as_nobody(work)


@pytest.mark.req("S3-29")
def test_a_private_file_of_another_user_is_a_clear_error(tmp_path: Path, reachable: Path):
    path = make(reachable / "a.db")
    path.chmod(0o000)

    def work() -> None:
        with pytest.raises(StoreReadOnly) as caught:
            connect(sqlite_url(path))
        assert str(path) in str(caught.value)

    as_nobody(work)


# ---- modes ----------------------------------------------------------------------------------------------------------


def modes(path: Path) -> set[int]:
    return {name.stat().st_mode & 0o777 for name in path.parent.glob(f"{path.name}*")}


@pytest.mark.req("S3-39")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_file_and_its_companions_are_their_owners_alone(tmp_path: Path, umask: int):
    path = tmp_path / "a.db"
    before = os.umask(umask)
    try:
        with connect(sqlite_url(path)) as database:
            database.run(lambda tx: tx.execute("INSERT INTO meta VALUES ('a', 'b')"))
            assert {name.name for name in tmp_path.iterdir()} == {"a.db", "a.db-wal", "a.db-shm"}
            assert modes(path) == {0o600}
    finally:
        os.umask(before)


@pytest.mark.req("S3-39")
def test_a_file_others_could_read_is_tightened_with_its_companions(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = killed(tmp_path / "a.db")
    for name in tmp_path.iterdir():
        name.chmod(0o644)
    with Ledger.open(sqlite_url(path)) as ledger:
        assert ledger.job("ads").info().done == 30
        assert modes(path) == {0o600}
    assert "0600" in caplog.text


# ---- no room --------------------------------------------------------------------------------------------------------

FILL = """
import sys
from headway._sql import connect
from headway.errors import StoreFull
from headway.ledger import Done, Ledger
path, freed = sys.argv[1:]
ledger = Ledger.open(f"sqlite:///{path}")
job = ledger.create("ads")
acknowledged = []

def record(number):
    job.record([Done(number, '{"meta":"' + "x" * 500 + '"}')], register=True)
    acknowledged.append(number)

for number in range(100_000):
    try:
        record(number)
    except StoreFull as error:
        assert path in str(error), error
        assert error.exit_code == 1 and error.hint
        break
else:
    raise SystemExit("it never filled up")
assert number > 5, number
for _ in range(3):  # it stays in good order
    try:
        record(number)
        raise SystemExit("recorded without room")
    except StoreFull:
        pass
assert job.info().done == len(acknowledged)  # what was acknowledged can still be read
exec(freed)
for number in range(number, number + 20):  # the same call goes on
    record(number)
ledger.close()
with Ledger.open(f"sqlite:///{path}") as ledger:
    ledger.database.verify()
    job = ledger.job("ads")
    assert job.info().done == len(acknowledged), (job.info().done, len(acknowledged))
    assert all(job.is_done(n) for n in acknowledged)
print("ok")
"""


@pytest.mark.req("S3-30")
def test_a_file_at_its_size_limit_fails_cleanly_and_recovers(tmp_path: Path):
    """The limit on file sizes stands in for a full disk where no disk can be made: it needs no rights."""
    code = "import resource; hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]; "
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))\n" + FILL
    freed = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.db", freed], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def can_mount() -> list[str]:
    """What to put before a command so that it can mount a disk only it sees."""
    for prefix in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        with contextlib.suppress(FileNotFoundError):
            probe = [*prefix, "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return prefix
    return []


@pytest.mark.req("S3-30")
@pytest.mark.parametrize("prefix", [found] if (found := can_mount()) else [])  # elsewhere the test above is the proof
def test_a_full_disk_fails_cleanly_and_recovers_after_freeing_space(tmp_path: Path, prefix: list[str]):
    script = 'mount -t tmpfs -o size=4m none "$1" && head -c 3000000 /dev/zero > "$1/ballast" && '
    script += 'exec "$2" -c "$3" "$1/a.db" "$4"'
    freed = "import os; os.unlink(os.path.dirname(path) + '/ballast')"
    done = subprocess.run(
        [*prefix, "sh", "-c", script, "sh", tmp_path, sys.executable, FILL, freed],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


@pytest.mark.req("S3-30")
def test_no_room_to_make_the_file_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "a.db"

    def work() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        with pytest.raises(StorageError) as caught:
            connect(sqlite_url(path))
        assert str(path) in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        connect(sqlite_url(path)).close()

    assert exit_code(forked(work)) == 0


# ---- the write-ahead log --------------------------------------------------------------------------------------------


@pytest.mark.req("S3-38")
def test_the_wal_stays_bounded_under_load_and_goes_when_the_database_is_closed(tmp_path: Path):
    path = tmp_path / "a.db"
    wal = Path(f"{path}-wal")
    largest = 0
    with Ledger.open(sqlite_url(path, "?synchronous=normal")) as ledger:
        job = ledger.create("ads")
        text = canonical({"words": "x" * 300})
        job.register(NewItem(n, text) for n in range(30_000))
        largest = wal.stat().st_size
        for start in range(0, 30_000, 1000):
            job.record([Done(n, text) for n in range(start, start + 1000)])
            largest = max(largest, wal.stat().st_size)
        job.record([Done(30_000)], register=True)
        assert ledger.database.one("PRAGMA journal_size_limit") == (8 * 2**20,)
        assert path.stat().st_size > 15 * 2**20
        assert largest < 32 * 2**20
        assert wal.stat().st_size <= 8 * 2**20 + 2**20
    assert not wal.exists()


# ---- flipped bytes --------------------------------------------------------------------------------------------------


def story(path: Path) -> dict[str, object]:
    """Everything the public API tells about the ledger, with the pages checked first as `headway doctor` does."""
    with Ledger.open(sqlite_url(path), create=False) as ledger:
        ledger.database.verify()
        told: dict[str, object] = {"jobs": [job.id for job in ledger.jobs()]}
        job = ledger.job("ads")
        info = job.info()
        told["counts"] = (info.total, info.done, info.failed, info.dead, info.failures, info.max_retries)
        told["is_done"] = [job.is_done(n) for n in range(40)]
        told["untouched"] = [(item.idx, item.key, item.payload) for item in job.untouched(-1, 100)]
        told["causes"] = [(cause.type, cause.message, cause.count) for cause in job.causes()]
        told["dead"] = [(dead.idx, dead.error) for dead in job.dead_letters()]
        told["metas"] = ledger.database.all("SELECT idx, status, meta, attempts FROM progress ORDER BY idx")
        return told


#: Fields in which a wrong answer would be wrong work: who is done, how many, what comes next.
VITAL = ("counts", "is_done")


def campaign(path: Path, flips: int, seed: int) -> dict[str, int]:
    """Flip one byte at a time; what the flipped file tells is the truth, a clear error, or counted as unnoticed."""
    chance = random.Random(seed)
    truth, original = story(path), path.read_bytes()
    copy = path.with_name("flipped.db")
    outcomes = {"same": 0, "error": 0, "text": 0, "vital": 0, "unclear": 0}
    for _ in range(flips):
        content = bytearray(original)
        offset = chance.randrange(len(content))
        content[offset] ^= 1 << chance.randrange(8)
        for companion in path.parent.glob("flipped.db*"):
            companion.unlink()
        copy.write_bytes(content)
        try:
            told = story(copy)
        except HeadwayError as error:
            clear = str(copy) in str(error) or isinstance(error, NotFound)  # of a job whose id was hit
            outcomes["error" if clear else "unclear"] += 1
            continue
        except (ValueError, TypeError, OverflowError) as error:
            raise AssertionError(f"a raw {type(error).__name__} for a flip at {offset}: {error}") from error
        if told == truth:
            outcomes["same"] += 1
        elif all(told[name] == truth[name] for name in VITAL):
            outcomes["text"] += 1
        else:
            outcomes["vital"] += 1
    return outcomes


@pytest.mark.req("S3-29")
def test_flipped_bytes_are_noticed_or_harmless_as_far_as_sqlite_can_tell(tmp_path: Path, record_property):
    """SQLite has no checksums over pages: what a flip makes of a text or a number inside a record it cannot know."""
    outcomes = campaign(make(tmp_path / "a.db"), 100, seed=3)
    record_property("flips", json.dumps(outcomes))
    assert outcomes["error"] > 0
    assert outcomes["unclear"] == 0
    assert outcomes["vital"] <= 100 // 50  # digits of a counter or of a status; nothing else
    assert outcomes["same"] + outcomes["error"] >= 100 * 3 // 4


@pytest.mark.faults
@pytest.mark.req("S3-29")
def test_five_thousand_mutations_never_crash_and_are_noticed_or_harmless(tmp_path: Path, record_property):
    outcomes = campaign(make(tmp_path / "a.db"), 5000, seed=4)
    record_property("flips", json.dumps(outcomes))
    assert outcomes["unclear"] == 0
    assert outcomes["vital"] <= 5000 // 50
    assert outcomes["same"] + outcomes["error"] >= 5000 * 3 // 4


FEW_FILES = """
import os, resource, sys, threading
from headway import _sql
database = _sql.connect(sys.argv[1])
taken, done = threading.Event(), threading.Event()

def hold():
    with database.read() as tx:
        tx.one("SELECT 1")
        taken.set()
        done.wait(30)

holder = threading.Thread(target=hold)
holder.start()
taken.wait(30)
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
files = []
try:
    while True:
        files.append(os.dup(0))
except OSError:
    pass
threading.Timer(3.0, done.set).start()
print(database.run(lambda tx: tx.one("SELECT 7"))[0])
"""


def test_who_may_open_no_more_files_waits_for_a_connection_of_another_thread(tmp_path: Path):
    command = [sys.executable, "-c", FEW_FILES, f"sqlite:///{tmp_path}/a.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "7\n", done.stderr
