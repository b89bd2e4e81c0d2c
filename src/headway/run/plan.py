"""What a run is going to do, found out before anything is written: which items are new, kept, changed or gone.

An item is known by its key if one was named, else by its place *and* its content. A result is never credited to an
item it was not made from: any doubt is an `InputChanged` that says what changed.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from headway.errors import InputChanged
from headway.ledger import Job, JobInfo, Ledger, NewItem
from headway.run.items import Read, Source

#: Ids that are made up are this long, longer if two would be the same.
_SHORT, _LONG = 4, 16


@dataclass(slots=True)
class Changes:
    """How the input differs from what the job knows. Lists hold indices of the ledger, or places of the input."""

    new: int = 0
    kept: int = 0
    gone: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    moved: bool = False
    first: str = ""

    @property
    def harmless(self) -> bool:
        return not (self.gone or self.changed or self.moved)

    def __str__(self) -> str:
        parts = [
            f"{self.new:,} new" if self.new else "",
            f"{len(self.changed):,} changed" if self.changed else "",
            f"{len(self.gone):,} gone" if self.gone else "",
            "the order is another" if self.moved else "",
        ]
        return ", ".join(part for part in parts if part) or "nothing changed"


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of looking: carried out by `carry_out`."""

    id: str
    source: Source
    function: str
    existing: JobInfo | None
    changes: Changes
    digest: str
    first_keys: tuple[str, ...]


def default_id(ledger: Ledger | None, function: str, source: str) -> str:
    """The id of a job nobody named: the same for the same command, short enough to type."""
    place = str(Path(source).resolve()) if source not in ("", "-") else source
    long = blake2b(f"{function}\0{place}".encode(), digest_size=8).hexdigest()
    for length in (_SHORT, 8, _LONG):
        known = _find(ledger, long[:length])
        if known is None or (known.function, known.source) == (function, place):
            return long[:length]
    return long


def look(
    ledger: Ledger | None,
    id: str,
    function: str,
    source: Source,
    *,
    fresh: bool = False,
) -> Plan:
    """Compare the input with the ledger; nothing is written. ``ledger`` None: there is no database yet."""
    existing = None if fresh else _find(ledger, id)
    digest = source.digest()
    if existing is None or ledger is None:
        count = sum(1 for _ in source)  # reads and so checks every item
        return Plan(id, source, function, None, Changes(new=count), digest, _first_keys(source))
    if existing.sealed and existing.digest == digest:
        changes = Changes(kept=existing.done)
    elif source.key is not None and existing.keyed_by == source.key:
        changes = _compare_keys(ledger.job(id), source)
    else:
        changes = _compare_places(ledger.job(id), source, sealed=existing.sealed)
    changes.kept = existing.done
    return Plan(id, source, function, existing, changes, digest, _first_keys(source))


def _first_keys(source: Source) -> tuple[str, ...]:
    return tuple(read.key or str(position) for position, read in islice(enumerate(source), 3))


def refuse_doubt(plan: Plan) -> None:
    """Raise `InputChanged` where results could be credited to the wrong item."""
    old = plan.existing
    if old is None:
        return
    if old.function and old.function != plan.function:
        raise InputChanged(f"Job {plan.id} was started with the function {old.function}, now it is {plan.function}.")
    if old.keyed_by != plan.source.key:
        before, now = (f"--key {key}" if key else "no --key" for key in (old.keyed_by, plan.source.key))
        raise InputChanged(f"Job {plan.id} was started with {before}, now there is {now}: items cannot be recognised.")
    if not plan.changes.harmless or (plan.changes.new and plan.source.key is None and old.sealed):
        raise InputChanged(
            f"The items of job {plan.id} changed since it was started: {plan.changes}.{plan.changes.first}"
        )


def carry_out(
    ledger: Ledger, job: Job, plan: Plan, *, max_retries: int, command: str = "", accept: bool = False
) -> None:
    """Give ``job`` (which the caller holds) the planned items. Interrupted anywhere, it can simply be done again."""
    _describe(ledger, job, plan, max_retries, command)
    unchanged = plan.existing is not None and plan.existing.sealed and plan.existing.digest == plan.digest
    if not unchanged:
        if accept and plan.existing is not None:
            (_apply_keys if plan.source.key is not None else _apply_contents)(job, plan.source)
            ledger.note("accept-changes", plan.id, {"changes": str(plan.changes)})
            job.rewrite_outputs()
        elif plan.source.key is not None and plan.existing is not None:
            _apply_keys(job, plan.source)  # without doubt: only new ones, and ones nobody has worked on
        else:
            # New, or its registration was interrupted: what is known already is the same, see _compare_places.
            known = 0 if plan.existing is None else plan.existing.total
            rest = islice(enumerate(plan.source), known, None)
            job.register(NewItem(position, read.payload, read.key, read.fingerprint) for position, read in rest)
    job.seal(plan.digest, settle=False)


def _describe(ledger: Ledger, job: Job, plan: Plan, max_retries: int, command: str) -> None:
    name = plan.source.name
    ledger.describe(
        job,
        function=plan.function,
        source=str(Path(name).resolve()) if name else "",
        command=command,
        keyed_by=plan.source.key,
        max_retries=max_retries,
    )


def _find(ledger: Ledger | None, id: str) -> JobInfo | None:
    if ledger is None:
        return None
    return next((info for info in ledger.jobs() if info.id == id), None)


# ---------------------------------------------------------------------------------------------------------------------
# By place and content


def _compare_places(job: Job, source: Source, *, sealed: bool) -> Changes:
    known = array("q", (mark or 0 for _, _, mark in job.fingerprints()))
    now = array("q")
    first = ""
    for position, read in enumerate(source):
        if not first and position < len(known) and known[position] != read.fingerprint:
            first = f" The first difference is at {source.place(read.place)}: {read.payload:.80}"
        if not first and sealed and position == len(known):
            first = f" The first one added is {source.place(read.place)}: {read.payload:.80}"
        now.append(read.fingerprint)
    changes = Changes(first=first)
    if now[: len(known)] == known:
        changes.new = len(now) - len(known)
        return changes
    missing, added = _difference(known, now)
    both = min(len(missing), len(added)) if len(known) == len(now) else 0
    changes.new = len(added) - both
    changes.changed = added[:both]
    changes.gone = missing[both:]
    changes.moved = not missing and not added
    return changes


def _difference(known: array[int], now: array[int]) -> tuple[list[int], list[int]]:
    """Positions in ``known`` and in ``now`` whose content the other does not have, counting repeats."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for position, mark in enumerate(known):
        places[mark].append(position)
    added = []
    for position, mark in enumerate(now):
        if places[mark]:
            places[mark].pop()
        else:
            added.append(position)
    return sorted(position for left in places.values() for position in left), added


def _apply_contents(job: Job, source: Source) -> None:
    """Keep what is the same content wherever it stands now, drop what is gone, add what is new."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    following = 0
    for idx, _, mark in job.fingerprints():
        places[mark or 0].append(idx)
        following = idx + 1
    for indices in places.values():
        indices.reverse()  # the first of equal items is matched first

    def added() -> Iterator[NewItem]:
        nonlocal following
        for read in source:
            if places[read.fingerprint]:
                places[read.fingerprint].pop()
            else:
                yield NewItem(following, read.payload, read.key, read.fingerprint)
                following += 1

    job.register(added())
    job.drop([idx for left in places.values() for idx in left])


# ---------------------------------------------------------------------------------------------------------------------
# By key


def _by_key(job: Job) -> tuple[dict[str, tuple[int, int]], int]:
    known = {}
    following = 0
    for idx, key, mark in job.fingerprints():
        known[key or ""] = (idx, mark or 0)
        following = idx + 1
    return known, following


def _compare_keys(job: Job, source: Source) -> Changes:
    known, _ = _by_key(job)
    changes = Changes()
    changed: dict[int, Read] = {}
    for read in source:
        idx, mark = known.pop(read.key or "", (-1, 0))
        if idx < 0:
            changes.new += 1
        elif mark != read.fingerprint:
            changed[idx] = read
    # What nobody has worked on yet simply takes the new content.
    worked_on = job.worked_on(list(changed))
    changes.changed = sorted(worked_on)
    changes.new += len(changed) - len(worked_on)
    changes.gone = sorted(idx for idx, _ in known.values())
    if changes.changed:
        read = changed[changes.changed[0]]
        changes.first = f" The first changed one is {read.key!r} at {source.place(read.place)}: {read.payload:.80}"
    elif changes.gone:
        changes.first = f" The first one gone is {next(iter(known))!r}."
    return changes


def _apply_keys(job: Job, source: Source) -> None:
    known, following = _by_key(job)
    new: list[NewItem] = []
    changed: list[NewItem] = []
    for read in source:
        idx, mark = known.pop(read.key or "", (-1, 0))
        if idx < 0:
            new.append(NewItem(following + len(new), read.payload, read.key, read.fingerprint))
        elif mark != read.fingerprint:
            changed.append(NewItem(idx, read.payload, read.key, read.fingerprint))
    job.drop([idx for idx, _ in known.values()])
    job.replace_items(changed)
    job.register(new)
