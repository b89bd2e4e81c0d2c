"""The exceptions that Headway raises.

    HeadwayError
    ├── UsageError              the caller's input is invalid (exit 2)
    │   ├── InvalidInput        a value, an id, an item, an items file
    │   ├── ConfigError         a setting, a profile, headway.toml
    │   └── MissingExtra        an optional dependency is not installed
    ├── NotFound                no such job, item, project or cause (exit 2)
    ├── Refused                 the operation would damage recorded work (exit 5)
    │   ├── Held                another owner has the lease
    │   │   └── JobHeld         another process is running this job
    │   ├── InputChanged        the items differ from the earlier run
    │   └── StaleClaim          the lease expired and another owner has the work
    │       └── LedgerRestored  the database was restored to a moment before this run began (exit 1)
    ├── ItemsFailed             items failed permanently, and raise_on_dead was set (exit 3)
    ├── SetupFailed             a set-up of workers failed (exit 1)
    ├── Unavailable             a server cannot be reached (exit 6)
    ├── ServerRefused           a server rejected a command (exit 1)
    ├── Stopping                a shutdown interrupted a wait (exit 143)
    └── StorageError            the store is unusable (exit 1)
        ├── StoreCorrupt        damaged, truncated or foreign pages
        ├── StoreForeign        not a Headway database
        ├── StoreNewer          written by a newer Headway
        ├── StoreReadOnly       no write permission
        └── StoreFull           no space left

`RetryLater` is not in this tree: functions and handlers raise it to postpone their own work.

The message says *what* happened and *why*. The ``hint`` says what to do next; tracebacks show it as a note.
``exit_code`` is the exit status of the command line.
"""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

from headway._version import DISTRIBUTION, install_command


class HeadwayError(Exception):
    """Base class of all Headway errors."""

    hint: str = ""
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.hint if hint is None else hint

    def __setattr__(self, name: str, value: object) -> None:
        """Keep the exception's note in step with its hint, because tracebacks show notes."""
        if name == "hint":
            notes = [note for note in getattr(self, "__notes__", ()) if note != f"Hint: {self.hint}"]
            self.__notes__ = [*notes, f"Hint: {value}"] if value else notes
        super().__setattr__(name, value)


class UsageError(HeadwayError):
    """The caller's input is invalid; nothing was changed."""

    exit_code = 2


class InvalidInput(UsageError):
    """A value, an id, an item or an items file is invalid."""


class ConfigError(UsageError):
    """A setting, a profile or headway.toml is invalid."""

    hint = "See where each setting comes from: headway config --show-origin"


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(
            f"{what} needs the optional part '{extra}', which is not installed.",
            hint=f"Install it: {install_command(extra)}",
        )
        self.extra, self.what = extra, what

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), (self.extra, self.what)  # pickle would pass the message to __init__


class NotFound(HeadwayError):
    """The job, item, project or cause does not exist in this store."""

    exit_code = 2


class Refused(HeadwayError):
    """The operation would damage work that is already recorded."""

    exit_code = 5


class Held(Refused):
    """Another owner has the lease."""


class JobHeld(Held):
    """Another process is running this job."""

    hint = "See who: headway show JOB. It is freed by itself within 30 s of that process's death."


class InputChanged(Refused):
    """The items differ from those the job was started with."""

    hint = "If that is intended, run again with --accept-changes, or start over with --fresh."


class StaleClaim(Refused):
    """The claim's lease expired and another owner has the work; nothing was recorded."""


class LedgerRestored(StaleClaim):
    """The database was restored to a moment before this run began."""

    hint = "Nothing was recorded since. Run the same command again: it continues from what the database has."
    exit_code = 1


class ItemsFailed(HeadwayError):
    """Items of a job failed permanently. ``result`` is the result of the run."""

    exit_code = 3
    result: Any = None


class SetupFailed(HeadwayError):
    """A worker's set-up failed, so the worker started nothing."""

    hint = "Correct the set-up, then run the same command again."


class Unavailable(HeadwayError):
    """A server cannot be reached, so the answer is unknown."""

    exit_code = 6


class ServerRefused(HeadwayError):
    """A server rejected a command: no permission, out of memory, or a key of the wrong type."""


class Stopping(HeadwayError):
    """The process is shutting down and accepts no new work."""

    exit_code = 143


class StorageError(HeadwayError):
    """The store is unusable; it was not modified."""


class StoreCorrupt(StorageError):
    """The database file is damaged."""

    hint = (
        "Nothing was written. Keep the file, restore a copy of it with its -wal file, "
        "or name another: --database sqlite:///other.db"
    )


class StoreForeign(StorageError):
    """The database was not created by Headway."""

    hint = "Name another file: --database sqlite:///headway.db"


class StoreNewer(StorageError):
    """The database was written by a newer release of Headway."""

    hint = f"Upgrade Headway on this machine: pip install --upgrade {DISTRIBUTION}"


class StoreReadOnly(StorageError):
    """The store is not writable."""

    hint = "Check the owner and mode of the file and of its directory, or name another: --database"


class StoreFull(StorageError):
    """No space is left; all acknowledged records are safe."""

    hint = "Free some space and run the same command again: it continues where it stopped."


#: Longest delay of `RetryLater`, seconds.
LONGEST_DELAY = 30 * 86_400.0
#: Maximum characters of its reason.
_REASON_LIMIT = 200


def is_delay(seconds: object) -> TypeGuard[float]:
    """Return whether the value is a number of seconds from 0 to `LONGEST_DELAY`."""
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= LONGEST_DELAY


class RetryLater(Exception):
    """Raised by a function or handler to postpone its item or task without counting an attempt.

    ``seconds`` is the delay, at most 30 days. With ``scope="job"`` nothing else of the job starts until then; in a queue,
    nothing else of the task's kind. ``reason`` is shown to people, up to 200 characters of it.
    """

    def __init__(self, seconds: float, reason: str = "", scope: Literal["item", "job"] = "item") -> None:
        if not is_delay(seconds):
            raise InvalidInput(
                f"The delay of RetryLater must be from 0 to {LONGEST_DELAY:,.0f} seconds (got {seconds!r:.60})."
            )
        if scope not in ("item", "job"):
            raise InvalidInput(f"The scope of RetryLater must be 'item' or 'job' (got {scope!r:.60}).")
        if not isinstance(reason, str):
            raise InvalidInput(f"The reason of RetryLater must be text (got {reason!r:.60}).")
        self.seconds, self.reason, self.scope = float(seconds), reason[:_REASON_LIMIT], scope
        super().__init__(f"retry in {self.seconds:g} s" + (f": {self.reason}" if self.reason else ""))

    def __reduce__(self) -> tuple[type[RetryLater], tuple[float, str, str]]:
        return type(self), (self.seconds, self.reason, self.scope)  # pickle would pass the message to __init__
