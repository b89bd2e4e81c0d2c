"""Run a function over many items, durably.

    result = headway.map(make_ad, products, job="ads-november")

`map` does it with local workers; `open_job` lets a program keep its own loop. Both resume by being called again.
"""

from __future__ import annotations

import asyncio
import atexit
import signal
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from headway._sql import absolute
from headway.config import Config
from headway.errors import HeadwayError, InvalidInput, Stopping
from headway.events import CallableSink, Event, Sink
from headway.ids import check_id
from headway.ledger import Cause, DeadLetter, Ledger
from headway.lifecycle import Shutdown, on_signals
from headway.retry import RetryPolicy
from headway.run import function as functions
from headway.run import plan as plans
from headway.run.attempt import GiveUp
from headway.run.display import Display, open_display
from headway.run.executor import Executor, capacity, check_executor
from headway.run.items import GivenItems
from headway.run.loop import OpenJob
from headway.run.performing import check_output, check_settings, configured_sinks, perform, take, tell
from headway.run.pool import Ending, Settings
from headway.run.results import ItemResult, Keep, as_they_came, in_order
from headway.run.tracking import Tracker
from headway.run.tracking import start as start_tracking
from headway.wording import with_option

if TYPE_CHECKING:
    from headway.run.fleet import FleetOptions

__all__ = [
    "Ending",
    "GiveUp",
    "ItemResult",
    "OpenJob",
    "Result",
    "Settings",
    "amap",
    "map",
    "open_job",
    "track",
]


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves behind. Counts are of the whole job."""

    job: str
    database: str
    outcome: str  # finished, or stopped by max_failures
    total: int
    done: int
    kept: int
    dead: int
    failures: int
    seconds: float
    causes: Sequence[Cause]
    decode: Callable[[Any], Any] | None = None

    def results(self, *, ordered: bool = True) -> Iterator[ItemResult]:
        """What the items returned, in the order of the items, or with ``ordered=False`` in that in which they were done,
        without those that returned None. What was not kept (no JSON, more than a megabyte) is left out."""
        with Ledger.open(self.database, create=False) as ledger:
            job = ledger.job(self.job)
            for found in in_order(job) if ordered else (each for _, each in as_they_came(job)):
                if self.decode is None or found.result is None:
                    yield found
                else:
                    yield replace(found, result=self.decode(found.result))

    def dead_letters(self) -> Iterator[DeadLetter]:
        """The items that failed for good, each with its error."""
        with Ledger.open(self.database, create=False) as ledger:
            job, after = ledger.job(self.job), -1
            while page := job.dead_letters(after=after):
                yield from page
                after = page[-1].idx


def map(
    function: Callable[[Any], Any],
    items: Iterable[object],
    *,
    job: str | None = None,
    database: str | None = None,
    workers: int | None = None,
    mode: str | None = None,
    start: Literal["auto", "fork", "spawn"] | None = None,
    executor: Executor | None = None,
    retries: int = 2,
    retry_delay: float = 1.0,
    timeout: float | None = None,
    rate: float | None = None,
    key: str | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    max_failures: int | None = None,
    last_pass: bool = True,
    output: str | Path | None = None,
    results: bool = True,
    keep_output: Literal["failed", "all", "none"] = "failed",
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    payload_limit: int | None = None,
    progress: str = "auto",
    on_complete: Callable[[Event], None] | None = None,
    fleet: bool = False,
    slots: int | None = None,
    any_version: bool = False,
) -> Result:
    """Call ``function`` with every item, in worker processes (``mode="process"``), in threads of one worker process or
    on its event loop, and remember what became of each.

    Called again with the same ``job`` it goes on where it was, whatever ended it. Without ``job`` the id is made of the
    function: its name, file and code; changed code is another job. Items are JSON values (or NumPy's numbers); an item that
    fails is tried ``retries`` more times, then it is a dead letter. ``on_complete`` is told when the job finished: once per
    completion, at least once if this process dies in between, always with the same event id. Ctrl-C lets running items
    finish, then raises KeyboardInterrupt.

    Workers are forked, or started anew (``start="spawn"``) where a fork is unsafe: other threads run here, or this is
    macOS. Then they import the function's module; what is in no module is forked all the same. It is said which.

    ``executor`` runs them elsewhere: anything with the ``submit`` of `concurrent.futures` (a ProcessPoolExecutor, loky,
    Dask's ``client.get_executor()``, mpi4py.futures). It stays the caller's and is never shut down; ``workers`` is how
    many items are there at once.

    What items print goes where it went, and is kept with those that fail (``keep_output``: failed, all or none). What
    the function returns is kept and comes back by `Result.results`, unless ``results=False``. ``encode`` makes JSON
    of it, ``decode`` makes it again what it was; dataclasses, dates, NumPy's and pydantic's values need no ``encode``.

    With ``fleet`` the workers of all machines do it (``headway worker``, on PostgreSQL; docs/fleet.md): ``slots`` of them,
    each with ``workers`` items at once. The function must be importable there, in the same version unless ``any_version``.
    The job goes on if this process ends; called again, it waits for the same run.
    """
    name = functions.name_of(functions.check(function, "The function"))
    if output is not None and not results:
        raise InvalidInput("A file of results needs results.", hint="Leave out results=False or output=.")
    if keep_output not in ("failed", "all", "none"):
        raise InvalidInput(f"keep_output = {keep_output!r} is not acceptable.", hint="Use failed, all or none.")
    config = Config(cli={"database": database, "payload_limit": payload_limit, "start": start})
    started = functions.FORK
    if executor is None:
        mode = functions.choose_mode(function, mode, name)
        workers = functions.choose_workers(workers or (1 if fleet and mode == "process" else workers), mode)
        started = functions.choose_start(function, encode, config.text("start"))
    else:
        check_executor(executor, mode)
        mode = "executor"
        workers = functions.choose_workers(capacity(executor) if workers is None else workers, "process")
    id = check_id(job, "a job id") if job is not None else functions.default_job(function)
    settings = Settings(
        workers=workers,
        mode=mode,
        policy=RetryPolicy(retries, retry_delay, jitter=0.5, cap=300.0),
        timeout=timeout,
        rate=rate,
        max_failures=max_failures,
        last_pass=last_pass,
        start=started,
        database_option=config.database_option,
    )
    check_settings(settings)
    source = GivenItems(items, key=key, limit=int(config["payload_limit"] or 0))
    if fleet and executor is not None:
        raise InvalidInput(
            "A fleet has its own workers, and takes no executor.", hint="Leave out fleet=True or executor=."
        )
    options = _fleet_options(config, function, encode, slots, fleet=fleet, any_version=any_version)
    sinks: list[Sink] = configured_sinks(config)
    shutdown = _given_shutdown.get() or Shutdown()
    place = absolute(config.text("database"))  # items that run in this process may change its directory
    with _hinting(config), Ledger.open(config.text("database"), stop=shutdown.abandon) as ledger, on_signals(shutdown):
        if on_complete is not None:
            sinks.append(CallableSink(f"on_complete {id}", on_complete, job=id))
        plan = plans.look(ledger, id, name, source, fresh=fresh)
        if not accept_changes:
            plans.refuse_doubt(plan)
        if output is not None:
            check_output(Path(output), ledger, plan)
        display = open_display(progress, stream=sys.stderr)
        keep = Keep(results=results, encode=encode, printed=keep_output)
        if options is not None:
            ending = _perform_by_fleet(
                ledger, plan, function, settings, options, config,
                keep=keep, accept=accept_changes, display=display, shutdown=shutdown, sinks=sinks,
                output=None if output is None else Path(output),
            )  # fmt: skip
            held = ledger.job(id)
        else:
            held, hold = take(ledger, plan, settings, accept=accept_changes)
            ending = perform(
                ledger, held, hold, function, settings,
                display=display, shutdown=shutdown, output=None if output is None else Path(output), sinks=sinks,
                keep=keep, executor=executor,
            )  # fmt: skip
        if ending.outcome == "interrupted":
            if shutdown.signum == signal.SIGINT:
                raise KeyboardInterrupt
            raise Stopping(f"Job {id} was interrupted; call it again to go on.")
        info = held.info()
        return Result(
            id, place, ending.outcome, info.total, info.done, ending.kept, info.dead,
            ending.failures, ending.seconds, held.causes(), decode,
        )  # fmt: skip


def _fleet_options(
    config: Config,
    function: Callable[[Any], Any],
    encode: Callable[[Any], Any] | None,
    slots: int | None,
    *,
    fleet: bool,
    any_version: bool,
) -> FleetOptions | None:
    """What was asked of a fleet, checked; None if there is none."""
    if not fleet:
        if slots is not None or any_version:
            raise InvalidInput("slots and any_version are for a fleet.", hint="Add fleet=True.")
        return None
    from headway.run.fleet import FleetOptions, check

    if encode is not None:
        raise InvalidInput("encode cannot be sent to the workers of a fleet.", hint="Return what is JSON.")
    options = FleetOptions(slots, any_version=any_version)
    check(config, function, options)
    return options


def _perform_by_fleet(
    ledger: Ledger,
    plan: plans.Plan,
    function: Callable[[Any], Any],
    settings: Settings,
    options: FleetOptions,
    config: Config,
    *,
    keep: Keep,
    accept: bool,
    display: Display,
    shutdown: Shutdown,
    sinks: Sequence[Sink],
    output: Path | None,
) -> Ending:
    """Give the job to the fleet, unless it has it already, and wait until its run is over."""
    from headway.run import fleet as fleets

    return fleets.start_and_follow(
        ledger, plan, function, settings, options, config,
        keep=replace(keep, all_results=keep.results and output is not None), display=display, shutdown=shutdown,
        take=lambda: take(ledger, plan, settings, accept=accept), output=output,
        tell=lambda: tell(ledger, sinks, shutdown.abandon),
    )  # fmt: skip


#: The verbs in hints to a program that ask something of the database.
_ASKING = frozenset({"dead", "items", "jobs", "results", "resume", "retry", "show", "stop"})


@contextmanager
def _hinting(config: Config) -> Iterator[None]:
    """What an error says to type finds the job also where the program named the database by hand."""
    try:
        yield
    except HeadwayError as error:
        error.hint = with_option(error.hint, config.database_option, lambda command: command.split()[1] in _ASKING)
        raise


P = ParamSpec("P")
T = TypeVar("T")

#: Who awaits `amap` can ask for an end that no signal asked for.
_given_shutdown: ContextVar[Shutdown | None] = ContextVar("given_shutdown", default=None)


def _awaitable(call: Callable[P, Result]) -> Callable[P, Coroutine[Any, Any, Result]]:
    async def amap(*arguments: P.args, **options: P.kwargs) -> Result:
        """`map` inside a running event loop, which goes on meanwhile: ``await headway.amap(fetch, urls, job="x")``.

        Items run in workers as ever, an async function on a loop of its own there. When the task that awaits it is
        cancelled, running items finish and are recorded, then the cancellation goes on.
        """
        shutdown = Shutdown()
        context = copy_context()
        context.run(_given_shutdown.set, shutdown)
        work = asyncio.get_running_loop().run_in_executor(None, partial(context.run, call, *arguments, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            shutdown.request(signal.SIGTERM)
            with suppress(HeadwayError):
                await asyncio.shield(work)
            raise

    return amap


amap = _awaitable(map)


def open_job(
    job: str,
    items: Iterable[object] | None = None,
    *,
    database: str | None = None,
    retries: int = 2,
    retry_delay: float = 1.0,
    key: str | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    payload_limit: int | None = None,
) -> OpenJob:
    """Hold a job in this process and work its items off in a loop of your own.

    ``items`` makes the job at first and is compared with it later, as in `map`; leave it out to go on with what is
    known.
    """
    config = Config(cli={"database": database, "payload_limit": payload_limit})
    limit = int(config["payload_limit"] or 0)
    source = None if items is None else GivenItems(items, key=key, limit=limit)
    with _hinting(config):
        return _open_job(
            job, source, config, retries=retries, retry_delay=retry_delay, fresh=fresh, accept_changes=accept_changes
        )


def _open_job(
    job: str,
    source: GivenItems | None,
    config: Config,
    *,
    retries: int = 2,
    retry_delay: float = 1.0,
    fresh: bool = False,
    accept_changes: bool = False,
) -> OpenJob:
    sinks = configured_sinks(config)
    ledger = Ledger.open(config.text("database"), create=source is not None)
    try:
        policy = RetryPolicy(retries, retry_delay, jitter=0.5, cap=300.0)
        settings = Settings(workers=1, mode="loop", policy=policy)
        if source is None:
            held = ledger.job(check_id(job, "a job id"))
            hold = ledger.hold(held, {"mode": "loop"})
            held = held.held_by(hold)
        else:
            plan = plans.look(ledger, check_id(job, "a job id"), "", source, fresh=fresh)
            if not accept_changes:
                plans.refuse_doubt(plan)
            held, hold = take(ledger, plan, settings, accept=accept_changes)
        return OpenJob(ledger, held, hold, policy, tell=partial(tell, ledger, sinks))
    except BaseException:
        ledger.close()
        raise


#: Trackers of this process that hold a job: (database, job) -> the tracker.
_trackers: weakref.WeakValueDictionary[tuple[str, str], Tracker[Any]] = weakref.WeakValueDictionary()


@atexit.register
def _close_trackers() -> None:
    """A program that ends in the middle of a loop records what was done in it."""
    for tracker in list(_trackers.values()):
        tracker.close()


def track(
    items: Iterable[T],
    *,
    job: str,
    database: str | None = None,
    key: str | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    progress: str = "auto",
    payload_limit: int | None = None,
) -> Tracker[T]:
    """The items that are not done yet, for a loop of your own: ``for page in headway.track(pages, job="pages"):``.

    An item is done when the loop asks for the next one; an exception, a break or a kill leaves it for the next time. What
    took less than a few hundredths of a second is recorded together, so after a kill some of the last of it runs again.
    Items are known by their JSON form (dates, paths, dataclasses have one), and the loop gets them as they were given. Two
    loops over one job cannot run at once, except that a second one in the same process ends the first: at a prompt or in a
    notebook an exception would keep that alive.
    """
    config = Config(cli={"database": database, "payload_limit": payload_limit})
    place = absolute(config.text("database")), job
    if (earlier := _trackers.pop(place, None)) is not None:
        earlier.close()

    def opened(source: GivenItems) -> OpenJob:
        return _open_job(job, source, config, fresh=fresh, accept_changes=accept_changes)

    limit = int(config["payload_limit"] or 0)
    with _hinting(config):
        tracker = start_tracking(opened, items, key=key, limit=limit, progress=progress)
    _trackers[place] = tracker
    return tracker
