"""Every error headway raises on purpose.

    HeadwayError
    ├── UsageError              what you gave us is wrong (exit 2)
    │   ├── InvalidInput        a value, an id, an item, an items file
    │   ├── ConfigError         a setting, a profile, headway.toml
    │   └── MissingExtra        an optional dependency is not installed
    ├── NotFound                no such job, item, project or cause (exit 2)
    ├── Refused                 it would harm recorded work (exit 5)
    │   ├── Held                somebody else has the lease
    │   │   └── JobHeld         another process is running this job
    │   ├── InputChanged        the items are not those of the earlier run
    │   └── StaleClaim          the lease lapsed and somebody else has the work
    │       └── LedgerRestored  the database was restored to a moment before this run began (exit 1)
    ├── ItemsFailed             items of a job failed for good, and raise_on_dead was set (exit 3)
    ├── Unavailable             a server cannot be reached (exit 6)
    ├── ServerRefused           a server answered, and said no (exit 1)
    ├── Stopping                a shutdown interrupted a wait (exit 143)
    └── StorageError            the store cannot be used as it is (exit 1)
        ├── StoreCorrupt        damaged, truncated or foreign pages
        ├── StoreForeign        not a headway database
        ├── StoreNewer          written by a newer headway
        ├── StoreReadOnly       no right to write
        └── StoreFull           no space left

An error says *what* happened and *why* (its message) and what to do next (its ``hint``, shown in tracebacks as a note).
``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from typing import Any


class HeadwayError(Exception):
    """Something headway noticed and can explain."""

    hint: str = ""
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.hint if hint is None else hint

    def __setattr__(self, name: str, value: object) -> None:
        """Keep the hint as a note too: tracebacks show notes."""
        if name == "hint":
            notes = [note for note in getattr(self, "__notes__", ()) if note != f"Hint: {self.hint}"]
            self.__notes__ = [*notes, f"Hint: {value}"] if value else notes
        super().__setattr__(name, value)


class UsageError(HeadwayError):
    """What was given cannot be used; nothing was changed."""

    exit_code = 2


class InvalidInput(UsageError):
    """A value, an id, an item or an items file is not acceptable."""


class ConfigError(UsageError):
    """A setting is not acceptable."""

    hint = "See where each setting comes from: headway config --show-origin"


class MissingExtra(UsageError):
    """An optional part is used but not installed."""

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(
            f"{what} needs the optional part '{extra}', which is not installed.",
            hint=f"Install it: pip install 'headway[{extra}]'",
        )
        self.extra, self.what = extra, what

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), (self.extra, self.what)  # it is made of other words than its message


class NotFound(HeadwayError):
    """There is no such thing in this store."""

    exit_code = 2


class Refused(HeadwayError):
    """Going on would harm work that is already recorded."""

    exit_code = 5


class Held(Refused):
    """Somebody else has the lease."""


class JobHeld(Held):
    """Another process is running this job."""

    hint = "See who: headway show JOB. It is freed by itself within 30 s of that process's death."


class InputChanged(Refused):
    """The items differ from those the job was started with."""

    hint = "If that is intended, run again with --accept-changes, or start over with --fresh."


class StaleClaim(Refused):
    """The claim's lease lapsed and the work was given to somebody else; nothing was recorded."""


class LedgerRestored(StaleClaim):
    """The database was restored to a moment before this run began."""

    hint = "Nothing was recorded since. Run the same command again: it continues from what the database has."
    exit_code = 1


class ItemsFailed(HeadwayError):
    """Items of a job failed for good. ``result`` is what the run would have returned."""

    exit_code = 3
    result: Any = None


class Unavailable(HeadwayError):
    """A server cannot be reached, so the answer is unknown (which is not the same as zero)."""

    exit_code = 6


class ServerRefused(HeadwayError):
    """A server understood a command and refused it: no right to it, no memory left, a wrong kind of key."""


class Stopping(HeadwayError):
    """The process is shutting down and accepts no new work."""

    exit_code = 143


class StorageError(HeadwayError):
    """The store cannot be used as it is; it was left untouched."""


class StoreCorrupt(StorageError):
    """The database file is damaged."""

    hint = (
        "Nothing was written. Keep the file, restore a copy of it with its -wal file, "
        "or name another: --database sqlite:///other.db"
    )


class StoreForeign(StorageError):
    """The database belongs to something else."""

    hint = "Name another file: --database sqlite:///headway.db"


class StoreNewer(StorageError):
    """The database was written by a newer headway."""

    hint = "Upgrade headway on this machine: pip install --upgrade headway"


class StoreReadOnly(StorageError):
    """There is no right to write here."""

    hint = "Check the owner and mode of the file and of its directory, or name another: --database"


class StoreFull(StorageError):
    """No space is left; what was acknowledged before is safe."""

    hint = "Free some space and run the same command again: it continues where it stopped."
