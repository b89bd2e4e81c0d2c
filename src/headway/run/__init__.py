"""Run a function over many items, durably.

    result = headway.map(make_ad, products, job="ads-november")

`map` runs the items in local workers; `open_job` and `track` let a program keep its own loop. All of them resume when
they are called again.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import signal
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from headway._sql import absolute
from headway.config import Config, database_option
from headway.core.ids import check_id
from headway.core.lifecycle import Shutdown, on_signals
from headway.core.setup import Setup, checked
from headway.core.text import cut, duration, plural, with_option
from headway.errors import HeadwayError, InvalidInput, ItemsFailed, Stopping, UsageError
from headway.events import CallableSink, Event, Sink
from headway.ledger import Cause, DeadLetter, Ledger
from headway.run import arguments
from headway.run import function as functions
from headway.run.display.display import open_display
from headway.run.held_job import OpenJob
from headway.run.items import GivenItems, WatchedItems
from headway.run.output.results import ItemResult, Keep, as_they_came, in_order
from headway.run.pool.executor import Executor
from headway.run.pool.runner import Ending, Settings
from headway.run.session import RunRequest, Session, configured_sinks
from headway.run.settings import later_limit_of, policy_of, settings_of
from headway.run.tracking import Tracker
from headway.run.tracking import start as start_tracking
from headway.run.worker.attempt import GiveUp

if TYPE_CHECKING:
    from headway.run.fleet.start import FleetOptions

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


#: Maximum number of causes named in the text of a result or error.
_CAUSES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run. Counts cover the whole job."""

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
    #: Keys that are not strings, by their text in the ledger.
    typed_keys: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        dead = f", {self.dead:,} dead ({self._causes()})" if self.dead else ", none dead"
        left = self.total - self.done - self.dead
        waiting = f", {left:,} left" if left else ""
        return f"<Result of job {self.job}: {self.outcome}, {self.done:,} of {self.total:,} done{dead}{waiting}>"

    def _repr_html_(self) -> str:
        """Return the counts, the causes and how to retry them as a table, for notebooks."""
        left = self.total - self.done - self.dead
        counts = {"done": self.done, "dead": self.dead, "left": left, "total": self.total}
        cells = "".join(f"<tr><th>{name}</th><td>{count:,}</td></tr>" for name, count in counts.items())
        title = f"Job {self.job}: {self.outcome} in {duration(self.seconds)}"
        html = f"<table><caption>{escape(title)}</caption>{cells}</table>"
        deadly = sorted((cause for cause in self.causes if cause.dead), key=lambda cause: -cause.dead)
        if not deadly:
            return html
        option = "" if self.database == absolute(Config().text("database")) else f" {database_option(self.database)}"
        rows = "".join(
            f"<tr><td>{cause.dead:,}</td><td>{escape(cut(f'{cause.type}: {cause.message}', 200))}</td>"
            f"<td><code>{escape(f'headway retry {self.job} --cause {cause.no}{option}')}</code></td></tr>"
            for cause in deadly[:_CAUSES_SHOWN]
        )
        if len(deadly) > _CAUSES_SHOWN:
            rows += f"<tr><td></td><td>{plural(len(deadly) - _CAUSES_SHOWN, 'more cause')}</td><td></td></tr>"
        return f"{html}<table><tr><th>dead</th><th>cause</th><th>retry, then call again</th></tr>{rows}</table>"

    def _causes(self) -> str:
        """Summarise the causes with the most dead letters."""
        deadly = sorted((cause for cause in self.causes if cause.dead), key=lambda cause: -cause.dead)
        named = [f"{cause.dead:,} x {cut(f'{cause.type}: {cause.message}', 80)}" for cause in deadly[:_CAUSES_SHOWN]]
        return "; ".join(named + ([plural(len(deadly) - len(named), "more cause")] if len(deadly) > len(named) else []))

    def raise_on_dead(self) -> None:
        """Raise `headway.errors.ItemsFailed` if items of the job are dead."""
        if not self.dead:
            return
        error = ItemsFailed(
            f"{self.dead:,} of {self.total:,} items of job {self.job} failed for good: {self._causes()}.",
            hint=f"See them: headway dead show {self.job}",
        )
        error.result = self
        raise error

    def results(self, *, ordered: bool = True) -> Iterator[ItemResult]:
        """Yield the results by index, or with ``ordered=False`` in the order of completion.

        Items that returned None are left out. So are results that were not kept: not JSON, or longer than a megabyte.
        """
        with Ledger.open(self.database, create=False) as ledger:
            job = ledger.job(self.job)
            for found in in_order(job) if ordered else (each for _, each in as_they_came(job)):
                result = found.result if self.decode is None or found.result is None else self.decode(found.result)
                yield ItemResult(found.index, self._typed(found.key), result)

    def to_frame(self) -> Any:
        """Return the results as a pandas DataFrame.

        The fields of a dict are columns; other values are in the column "result". The index has the items' keys with
        their types, or else their positions. So ``frame.join(result.to_frame())`` adds the results to the DataFrame
        whose rows were the items. Dead items have no row.
        """
        pandas = _pandas()
        found = list(self.results())
        rows = [each.result if isinstance(each.result, dict) else {"result": each.result} for each in found]
        return pandas.DataFrame(rows, index=_labels(pandas, found))

    def to_series(self) -> Any:
        """Return the results as a pandas Series, by key or position as in `to_frame`."""
        pandas = _pandas()
        found = list(self.results())
        values = [each.result for each in found]
        objects = any(isinstance(value, dict | list) for value in values) or not values
        return pandas.Series(values, index=_labels(pandas, found), name="result", dtype=object if objects else None)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the items that failed for good, each with its error."""
        with Ledger.open(self.database, create=False) as ledger:
            job, after = ledger.job(self.job), -1
            while page := job.dead_letters(after=after):
                for letter in page:
                    yield letter._replace(key=self._typed(letter.key))
                after = page[-1].idx

    def _typed(self, key: str | None) -> Any:
        return key if key is None else self.typed_keys.get(key, key)


def _labels(pandas: Any, found: Sequence[ItemResult]) -> Any:
    return pandas.Index([each.index if each.key is None else each.key for each in found])


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise UsageError("A DataFrame needs pandas, which is not installed.", hint="pip install pandas") from error


def map(
    function: Callable[..., Any],
    items: Iterable[object],
    *,
    job: str | None = None,
    database: str | None = None,
    workers: int | None = None,
    mode: str | None = None,
    start: Literal["auto", "fork", "spawn"] | None = None,
    executor: Executor | None = None,
    setup: Callable[[], Any] | None = None,
    retries: int | None = None,
    retry_delay: float | None = None,
    later_limit: str | int | None = None,
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
    progress: str | None = None,
    on_complete: Callable[[Event], None] | None = None,
    raise_on_dead: bool = False,
    fleet: bool = False,
    slots: int | None = None,
    any_version: bool = False,
) -> Result:
    """Call ``function`` with every item in workers, and record the outcome of each.

    Workers are processes (``mode="process"``), threads of one process, or tasks on its event loop. Called again with
    the same ``job``, the run resumes, whatever ended it. Without ``job`` the id comes from the function's name, file
    and code, so changed code is a new job.

    Items are JSON values or NumPy numbers. An item that fails is retried ``retries`` times, then becomes a dead
    letter. With ``raise_on_dead``, dead letters raise `headway.errors.ItemsFailed` at the end; its ``result`` is the
    `Result`. ``on_complete`` is called when the job has finished. If this process dies in between, it may be called
    again with the same event id. Ctrl-C lets running items finish, then raises KeyboardInterrupt.

    ``setup`` opens what a worker needs: an HTTP session, a model, a database connection. It is a function that returns a
    context manager or has one yield; on an event loop it may be async. Each worker process, thread or loop enters it
    once, before its first item, and passes the value to ``function`` as the second argument.

    A function that raises `headway.RetryLater` postpones its item without an attempt counted, up to ``later_limit``.

    Arguments that are None come from the settings: ``HEADWAY_*``, then ``headway.toml``, then the default.

    Workers are forked. Where a fork is unsafe (other threads run here, or this is macOS), they are spawned
    (``start="spawn"``) and import the function's module. A function that is in no module is forked anyway. A message
    says which start was chosen and why.

    ``executor`` runs the items elsewhere. It is any object with the ``submit`` of `concurrent.futures`: a
    ProcessPoolExecutor, loky, Dask's ``client.get_executor()``, mpi4py.futures. It is never shut down. ``workers``
    limits how many items it has at once.

    Output of items goes where it went before, and is kept for failed items (``keep_output``: failed, all or none).
    Return values are kept for `Result.results`, unless ``results=False``. ``encode`` turns a return value into JSON,
    and ``decode`` restores it. Dataclasses, dates, NumPy and pydantic values need no ``encode``.

    With ``fleet``, workers on all machines run the job (``headway worker``, on PostgreSQL; docs/reference/fleet.md). It has
    ``slots`` slots, each with ``workers`` items at once. The function must be importable there, in the same version
    unless ``any_version``. The job continues if this process ends; called again, it waits for the same run.
    """
    name = functions.name_of(functions.check(function, "The function", 1 if setup is None else 2))
    arguments.refuse_mapping(items)
    arguments.check_key(key)
    arguments.check_flags(
        fresh=fresh, accept_changes=accept_changes, last_pass=last_pass, results=results, fleet=fleet,
        any_version=any_version, raise_on_dead=raise_on_dead,
    )  # fmt: skip
    arguments.check_callables(encode=encode, decode=decode, on_complete=on_complete)
    arguments.check_path("output", output)
    arguments.check_choice("keep_output", keep_output, ("failed", "all", "none"))
    if output is not None and not results:
        raise InvalidInput(
            "output= needs results, and results=False keeps none.", hint="Leave out results=False or output=."
        )
    config = Config(
        cli={
            "database": database, "workers": workers, "mode": mode, "start": start, "retries": retries,
            "retry_delay": retry_delay, "timeout": timeout, "rate": rate, "max_failures": max_failures,
            "payload_limit": payload_limit, "progress": progress,
            "later_limit": None if later_limit is None else str(later_limit),
        }
    )  # fmt: skip
    settings = settings_of(
        config, function, name, last_pass=last_pass, fleet=fleet, executor=executor, encode=encode, setup=setup
    )
    entered = _checked_setup(setup, settings, executor)
    id = check_id(job, "a job id") if job is not None else functions.default_job(function)
    given = GivenItems(items, key=key, limit=int(config["payload_limit"] or 0))
    if fleet and executor is not None:
        raise InvalidInput(
            "A fleet has its own workers, so executor= cannot be used with it.",
            hint="Leave out fleet=True or executor=.",
        )
    options = _fleet_options(config, function, encode, setup, slots, fleet=fleet, any_version=any_version)
    sinks: list[Sink] = configured_sinks(config)
    if on_complete is not None:
        sinks.append(CallableSink(f"on_complete {id}", on_complete, job=id))
    request = RunRequest(
        config, settings, function, name, _given_shutdown.get() or Shutdown(),
        Keep(results=results, encode=encode, printed=keep_output), None if output is None else Path(output), sinks,
        executor, options, fresh=fresh, accept_changes=accept_changes, setup=entered,
    )  # fmt: skip
    address = absolute(config.text("database"))  # items that run in this process may change directory
    display = open_display(config.text("progress"), stream=sys.stderr, color=config.text("color"))
    with (
        _hinting(config),
        _interrupting(request.shutdown),
        Session(request) as session,
        on_signals(request.shutdown),
    ):
        if job is None and session.find(id) is None:
            id = _recorded_id(session, function) or id
        plan = session.compare(id, WatchedItems(given, request.shutdown, display.say))
        session.check(plan)
        if job is None and plan.existing is None and (other := _other_version(session, id, name)) is not None:
            display.say(f'Job {id} is new: the code of {name} changed. To go on with the earlier one: job="{other}"')
        held = session.hold(plan)
        ending = session.work(display)
        if ending is None:
            stop = f"headway stop {id} {settings.database_option}".rstrip()
            display.say(f"Job {id} goes on without this process. Stop it:  {stop}")
        if ending is None or ending.outcome == "interrupted":
            raise Stopping(f"Job {id} was interrupted; call it again to go on.")
        info = held.info()
        result = Result(
            id, address, ending.outcome, info.total, info.done, ending.kept, info.dead,
            ending.failures, ending.seconds, held.causes(), decode, given.typed_keys(),
        )  # fmt: skip
        if raise_on_dead:
            result.raise_on_dead()
        return result


def _checked_setup(setup: object, settings: Settings, executor: Executor | None) -> Setup | None:
    """Validate the set-up, before anything is written."""
    if setup is None:
        return None
    if executor is not None:
        raise InvalidInput(
            "setup= cannot be used with executor=, because the executor starts its own workers.",
            hint="Open it in the executor's own initializer, or leave out executor=.",
        )
    return checked(setup, loop=settings.mode == "async")


def _recorded_id(session: Session, function: Callable[[Any], Any]) -> str | None:
    """Return the job id that an earlier Headway version gave this function, if that job exists."""
    id = functions.earlier_default_job(function)
    return None if session.find(id) is None else id


def _other_version(session: Session, id: str, name: str) -> str | None:
    """Return the latest unnamed job of a function with the same name."""
    stem = id.rpartition("-")[0]
    others = [info for info in session.jobs() if info.function == name and info.id.rpartition("-")[0] == stem]
    return max(others, key=lambda info: info.updated_at).id if others else None


def _fleet_options(
    config: Config,
    function: Callable[..., Any],
    encode: Callable[[Any], Any] | None,
    setup: Callable[[], Any] | None,
    slots: int | None,
    *,
    fleet: bool,
    any_version: bool,
) -> FleetOptions | None:
    """Validate the fleet arguments; return None without a fleet."""
    if not fleet:
        if slots is not None or any_version:
            raise InvalidInput("slots and any_version need fleet=True.", hint="Add fleet=True.")
        return None
    from headway.run.fleet.start import FleetOptions, check, importable

    if encode is not None:
        raise InvalidInput(
            "encode= cannot be used with a fleet, because it cannot be sent to the workers.",
            hint="Return values that are JSON.",
        )
    if slots is not None and type(slots) is not int:
        raise InvalidInput(f"slots must be a whole number (got {slots!r:.60}).")
    options = FleetOptions(slots, any_version=any_version, setup=None if setup is None else importable(setup))
    check(config, function, options)
    return options


#: Commands in hints that need the database option.
_ASKING = frozenset({"dead", "items", "jobs", "results", "resume", "retry", "show", "stop"})


#: Command-line options in hints and the equivalent arguments.
_ARGUMENTS = {
    "--accept-changes": "accept_changes=True",
    "--fresh": "fresh=True",
    "--key": "key=",
    "another --output": "another output=",
}


@contextmanager
def _hinting(config: Config) -> Iterator[None]:
    """Adapt hints of errors to a program.

    They name arguments instead of options, and include the database if it is not the configured one.
    """
    try:
        yield
    except HeadwayError as error:
        hint = error.hint
        for option, argument in _ARGUMENTS.items():
            hint = hint.replace(option, argument)
        error.hint = with_option(hint, config.database_option, lambda command: command.split()[1] in _ASKING)
        raise


@contextmanager
def _interrupting(shutdown: Shutdown) -> Iterator[None]:
    """Raise KeyboardInterrupt if Ctrl-C stopped the block."""
    try:
        yield
    except Stopping:
        if shutdown.signum == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


P = ParamSpec("P")
T = TypeVar("T")

#: Lets `amap` stop a run without a signal.
_given_shutdown: ContextVar[Shutdown | None] = ContextVar("given_shutdown", default=None)


def _awaitable(call: Callable[P, Result]) -> Callable[P, Coroutine[Any, Any, Result]]:
    async def amap(*given: P.args, **options: P.kwargs) -> Result:
        """Run `map` without blocking the event loop: ``await headway.amap(fetch, urls, job="x")``.

        Items run in workers as usual; an async function runs on a loop there. If the awaiting task is cancelled,
        running items finish and are recorded before the cancellation continues.
        """
        shutdown = Shutdown()
        context = copy_context()
        context.run(_given_shutdown.set, shutdown)
        work = asyncio.get_running_loop().run_in_executor(None, partial(context.run, call, *given, **options))
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
    retries: int | None = None,
    retry_delay: float | None = None,
    later_limit: str | int | None = None,
    key: str | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    payload_limit: int | None = None,
) -> OpenJob:
    """Hold a job in this process and work off its items in your own loop.

    ``items`` creates the job, and is compared with it in later calls, as in `map`. Leave it out to resume with the
    registered items.
    """
    config = Config(
        cli={
            "database": database, "retries": retries, "retry_delay": retry_delay, "payload_limit": payload_limit,
            "later_limit": None if later_limit is None else str(later_limit),
        }
    )  # fmt: skip
    check_id(job, "a job id")
    arguments.check_key(key)
    arguments.check_flags(fresh=fresh, accept_changes=accept_changes)
    arguments.refuse_mapping(items)
    source = None if items is None else GivenItems(items, key=key, limit=int(config["payload_limit"] or 0))
    with _hinting(config):
        return _open_job(job, source, config, fresh=fresh, accept_changes=accept_changes)


def _open_job(
    job: str,
    source: GivenItems | None,
    config: Config,
    *,
    fresh: bool,
    accept_changes: bool,
) -> OpenJob:
    settings = Settings(workers=1, mode="loop", policy=policy_of(config), later_limit=later_limit_of(config))
    request = RunRequest(config, settings, sinks=configured_sinks(config), fresh=fresh, accept_changes=accept_changes)
    session = Session(request, create=source is not None)
    with ExitStack() as opened:
        opened.enter_context(session)
        if source is None:
            session.hold_existing(job)
        else:
            plan = session.compare(job, source)
            session.check(plan)
            session.hold(plan)
        held = OpenJob(session, settings.policy, settings.later_limit)
        opened.pop_all()  # `held` releases the job
        return held


#: Trackers of this process that hold a job, by (database, job).
_trackers: weakref.WeakValueDictionary[tuple[str, str], Tracker[Any]] = weakref.WeakValueDictionary()


@atexit.register
def _close_trackers() -> None:
    """Record finished items of loops that the end of the program interrupts."""
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
    progress: str | None = None,
    payload_limit: int | None = None,
) -> Tracker[T]:
    """Iterate over the items that are not done: ``for page in headway.track(pages, job="pages"):``.

    An item is done when the loop asks for the next one. An exception, a break or a kill leaves it for the next time.
    Items shorter than a few hundredths of a second are committed together, so some of the last ones may run again
    after a kill.

    Items are identified by their JSON form (dates, paths and dataclasses have one); the loop gets the original
    objects. Two loops over one job cannot run at once. A second one in the same process ends the first, because an
    exception would keep the first alive at a prompt or in a notebook.
    """
    config = Config(cli={"database": database, "payload_limit": payload_limit, "progress": progress})
    check_id(job, "a job id")
    arguments.check_key(key)
    arguments.check_flags(fresh=fresh, accept_changes=accept_changes)
    key_of_job = absolute(config.text("database")), job
    if (earlier := _trackers.pop(key_of_job, None)) is not None:
        earlier.close()

    def opened(source: GivenItems) -> OpenJob:
        return _open_job(job, source, config, fresh=fresh, accept_changes=accept_changes)

    limit = int(config["payload_limit"] or 0)
    display = open_display(config.text("progress"), stream=sys.stderr, color=config.text("color"), shared=True)
    with _hinting(config):
        tracker = start_tracking(opened, items, key=key, limit=limit, display=display)
    _trackers[key_of_job] = tracker
    return tracker
