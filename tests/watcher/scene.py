"""A real Redis, real RQ workers, a watcher and somebody who listens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rq import Queue
from rq.job import Job, JobStatus

from headway._sql import connect
from headway.events import Event
from headway.watcher import NotificationWatcher, ProcessedStore, RedisProcessedStore, SqlProcessedStore, WatcherSettings
from headway.watcher.adapters import connect as connect_redis
from headway.watcher.adapters import default_ports
from headway.watcher.ports import RedisProto
from tests.services.redis import RedisServer
from tests.services.tracing import untraced_environment
from tests.services.waiting import eventually

ROOT = Path(__file__).parents[2]
CHANNEL = "digits:events"


class Listener:
    """Subscribed to the events' channel from its creation on."""

    def __init__(self, server: RedisServer, channel: str = CHANNEL) -> None:
        self._client = server.client()  # kept: redis-py closes the connections of a client that is collected
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(channel)
        eventually(lambda: self._pubsub.subscribed and server.client().pubsub_numsub(channel)[0][1])
        self.all: list[dict[str, Any]] = []

    def hear(self, most: int = 1_000_000) -> list[dict[str, Any]]:
        """What was told so far; ``most``: return when so many were, though more may follow."""
        connection = self._pubsub.connection
        assert connection is not None
        while len(self.all) < most and connection.can_read(
            timeout=0.01
        ):  # see PubSubAdapter.get_message for why not just get_message
            message = self._pubsub.get_message(timeout=5)
            if message is not None:
                self.all.append(json.loads(message["data"]))
        return self.all

    def expect(self, *wanted: tuple[str, str], timeout: float = 20) -> list[dict[str, Any]]:
        """Wait until exactly these (job, kind) were told, whatever their order."""

        def enough() -> bool:
            assert len(self.hear()) >= len(wanted), f"so far {self.kinds}"
            return True

        eventually(enough, timeout)
        assert sorted(self.kinds) == sorted(wanted), f"told were {self.kinds}"
        by_name = {(event["job"], event["data"]["kind"]): event for event in self.all}
        return [by_name[one] for one in wanted]

    def expect_number(self, number: int, timeout: float = 20) -> list[dict[str, Any]]:
        """Wait until so many were told, and no more."""
        eventually(lambda: len(self.hear()) >= number, timeout, f"{number} events")
        assert len(self.hear()) == number, f"told were {self.kinds}"
        return self.all

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(event["job"], event["data"]["kind"]) for event in self.all]


class Watching:
    """A watcher in a thread of this process."""

    def __init__(self, watcher: NotificationWatcher) -> None:
        self.watcher = watcher
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(120)

    def _run(self) -> None:
        opening = self.watcher.open

        def opened() -> None:
            try:
                opening()
            finally:
                self._ready.set()

        self.watcher.open = opened  # type: ignore[method-assign]  # tells when it is subscribed and caught up
        try:
            self.watcher.run(self.stop)
        except Exception as error:  # noqa: BLE001 - whatever ended it is what the test asks for
            self.error = error

    def ended(self) -> BaseException | None:
        """Its error, once it has ended by itself."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error

    def end(self) -> None:
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


class Meddled:
    """The real port, and something that happens each time right after one of its verbs."""

    def __init__(self, inner: RedisProto, after: Mapping[str, Callable[[], None]]) -> None:
        self._inner = inner
        self._after = after

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if name not in self._after:
            return verb

        def verb_and_then(*arguments: Any, **named: Any) -> Any:
            answer = verb(*arguments, **named)
            self._after[name]()
            return answer

        return verb_and_then


class Scene:
    def __init__(self, server: RedisServer, directory: Path, *, queue: str = "digits", db: int = 0) -> None:
        self.server = server
        self.directory = directory
        self.name = queue
        self.db = db
        self.url = server.url(db)
        self.redis = server.client(db)
        self.raw = self.redis.__class__(port=server.port, db=db)
        self.queue = Queue(queue, connection=self.raw)
        self.events = Listener(server)
        self._processes: list[subprocess.Popen[bytes]] = []

    # ---- the watcher -----------------------------------------------------------------------------------------------

    def settings(self, **changes: Any) -> WatcherSettings:
        facts: dict[str, Any] = {
            "redis_url": self.url,
            "queues": (self.name,),
            "channel": CHANNEL,
            "stuck_job_timeout_s": 3600.0,
        }
        return WatcherSettings(**(facts | changes))

    def open_store(self, queue: str) -> ProcessedStore:
        return SqlProcessedStore(connect(f"sqlite:///{self.directory}/watcher.db?synchronous=normal"), queue)

    def redis_store(self, queue: str) -> ProcessedStore:
        return RedisProcessedStore(connect_redis(self.url), queue)

    def watcher(
        self,
        store: Callable[[str], ProcessedStore] | None = None,
        after: Mapping[str, Callable[[], None]] | None = None,
        append: Callable[[Sequence[Event]], None] = lambda _: None,
        **changes: Any,
    ) -> NotificationWatcher:
        ports = default_ports()
        if after is not None:
            ports = replace(ports, redis=lambda url: Meddled(connect_redis(url), after))
        return NotificationWatcher(self.settings(**changes), ports, store or self.open_store, append)

    def start(self, **changes: Any) -> Watching:
        """A watcher that is expected to end by itself."""
        return Watching(self.watcher(**changes))

    @contextmanager
    def watching(self, **changes: Any) -> Iterator[Watching]:
        watching = self.start(**changes)
        try:
            yield watching
        finally:
            watching.end()
        if watching.error is not None:
            raise watching.error

    # ---- workers ---------------------------------------------------------------------------------------------------

    def worker(self, *, lease: int = 0) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.watcher.work", self.url, self.name, str(lease)],
            cwd=self.directory,
            # It runs none of our code, so its lines need not be counted.
            env=untraced_environment() | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
            start_new_session=True,
        )
        self._processes.append(process)
        eventually(lambda: self.redis.scard("rq:workers") >= len(self._alive()), 30, "the worker is there")
        return process

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def enqueue(self, function: str, *arguments: Any, **options: Any) -> Job:
        return self.queue.enqueue(f"tests.watcher.work.{function}", *arguments, **options)

    def burst(self, count: int, *, failure_ttl: int | None = None, prefix: str = "burst") -> list[str]:
        """So many failed jobs at once, written by RQ's own code, without a worker."""
        ids = [f"{prefix}-{number:05}" for number in range(count)]
        for start in range(0, count, 500):
            with self.raw.pipeline() as pipe:
                for job_id in ids[start : start + 500]:
                    job = Job.create(
                        "tests.watcher.work.fail", id=job_id, connection=self.raw, origin=self.name,
                        failure_ttl=failure_ttl, status=JobStatus.FAILED,
                    )  # fmt: skip
                    job._handle_failure("Boom: in a burst", pipe, worker_name="w", execution_id=f"e{job_id}")
                pipe.execute()
        return ids

    def commands(self) -> dict[str, int]:
        """How often each command was called so far, by anybody."""
        stats: dict[str, dict[str, int]] = self.redis.info("commandstats")
        return {name.removeprefix("cmdstat_").upper(): entry["calls"] for name, entry in stats.items()}

    def sweeps(self, number: int) -> None:
        """Wait for so many more sweeps of a watcher; each asks once what was touched."""
        wanted = self.commands().get("EXEC", 0) + number
        eventually(lambda: self.commands().get("EXEC", 0) >= wanted, 30, "sweeps")

    def hang(self, **options: Any) -> tuple[Job, Path]:
        """A job that runs until the file is made; it does run when this returns."""
        flag = self.directory / f"flag-{os.urandom(4).hex()}"
        job = self.enqueue("wait_for", str(flag), options.pop("then", "succeed"), **options)
        eventually(lambda: job.get_status() == "started", 20, "it runs")
        return job, flag

    def horses(self, process: subprocess.Popen[bytes]) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]

    def kill_group(self, process: subprocess.Popen[bytes]) -> None:
        """Worker and work-horse at once, as when the machine goes. The horse has a group of its own."""
        horses = self.horses(process)
        process.kill()
        process.wait()
        for horse in horses:
            with suppress(ProcessLookupError):  # it had done its work
                os.kill(horse, signal.SIGKILL)

    def signal_group(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """To worker and work-horse: a machine that is put to sleep, or woken."""
        for horse in self.horses(process):
            os.kill(horse, number)
        os.kill(process.pid, number)

    def close(self) -> None:
        for process in self._alive():
            self.kill_group(process)
