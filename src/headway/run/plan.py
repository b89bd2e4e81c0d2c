"""What a run is going to do, determined before anything is written: which items are new, kept, changed or gone.

An item is identified by its key if one is named, else by its position *and* content. A result is never credited to an
item it was not made from. Any doubt raises `InputChanged`, which says what changed.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from headway.errors import InputChanged
from headway.ledger import Job, JobInfo, Ledger, NewItem
from headway.ledger.store import finished_items
from headway.run.items import Read, Source

#: Length of generated ids; longer ones are used on a collision.
_SHORT, _LONG = 4, 16


@dataclass(slots=True)
class Changes:
    """How the input differs from the job.

    ``gone`` has indices of the ledger; ``changed`` has those or positions of the input.
    """

    new: int = 0
    kept: int = 0
    gone: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    moved: bool = False
    first: str = ""

    @property
    def none(self) -> bool:
        """Whether the input is the same."""
        return self.harmless and not self.new

    @property
    def harmless(self) -> bool:
        """Whether the only changes are new items."""
        return not (self.gone or self.changed or self.moved)

    def __str__(self) -> str:
        parts = [
            f"{self.new:,} new" if self.new else "",
            f"{len(self.changed):,} changed" if self.changed else "",
            f"{len(self.gone):,} gone" if self.gone else "",
            "the order changed" if self.moved else "",
        ]
        return ", ".join(part for part in parts if part) or "nothing changed"


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of `compare`, to be executed by `carry_out`."""

    id: str
    source: Source
    function: str
    existing: JobInfo | None
    changes: Changes
    digest: str
    fresh: bool = False  # archive the existing job first


def default_id(ledger: Ledger | None, function: str, source: str) -> str:
    """Return a short id for an unnamed job, the same for the same command."""
    place = str(Path(source).resolve()) if source not in ("", "-") else source
    long = blake2b(f"{function}\0{place}".encode(), digest_size=8).hexdigest()
    for length in (_SHORT, 8, _LONG):
        known = find(ledger, long[:length])
        if known is None or (known.function, known.source) == (function, place):
            return long[:length]
    return long


def compare(
    ledger: Ledger | None,
    id: str,
    function: str,
    source: Source,
    *,
    fresh: bool = False,
) -> Plan:
    """Compare the input with the ledger without writing. ``ledger`` is None if there is no database yet."""
    existing = None if fresh else find(ledger, id)
    if existing is None or ledger is None:
        count = sum(1 for _ in source)  # reads and thereby validates every item
        return Plan(id, source, function, None, Changes(new=count), source.digest_read, fresh)
    if existing.sealed and existing.digest == (digest := source.digest()):
        return Plan(id, source, function, existing, Changes(kept=existing.done), digest)
    if source.key is not None and existing.keyed_by == source.key:
        changes = _compare_keys(ledger.job(id), source)
    else:
        changes = _compare_positions(ledger.job(id), source, sealed=existing.sealed)
    changes.kept = existing.done
    return Plan(id, source, function, existing, changes, source.digest_read)


def is_current(plan: Plan, job: Job) -> bool:
    """Return whether ``job``, now held by the caller, still matches the plan."""
    known, now = plan.existing, job.info()
    if known is None:
        return now.total == 0
    return (known.no, known.total, known.digest) == (now.no, now.total, now.digest)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a run would do."""

    to_do: int
    kept: int
    dead: int
    first_keys: tuple[str, ...]


def preview(ledger: Ledger | None, plan: Plan) -> Preview:
    """Return what the plan would leave to do if its changes were accepted. Nothing is written."""
    if plan.existing is None or ledger is None:
        return Preview(plan.changes.new, 0, 0, _names(enumerate(plan.source)))
    job = ledger.job(plan.id)
    if plan.changes.none:
        waiting = [item.name for item in job.untouched(-1, 3)]
        waiting += [item.name for item, _ in job.due(3, within=10**8)]
        known = plan.existing
        return Preview(known.remaining, known.done, known.dead, tuple(waiting[:3]))
    is_done = dict.fromkeys(finished_items.done(job), True) | dict.fromkeys(finished_items.dead(job), False)
    matched = _match_keys(job, plan.source) if plan.source.key is not None else _match_contents(job, plan.source)
    to_do = kept = dead = 0
    first: list[tuple[int, Read]] = []
    for position, read, idx in matched:
        if idx in is_done:
            kept += is_done[idx]
            dead += not is_done[idx]
            continue
        to_do += 1
        if len(first) < 3:
            first.append((idx if idx is not None else position, read))
    return Preview(to_do, kept, dead, _names(first))


def _names(reads: Iterable[tuple[int, Read]]) -> tuple[str, ...]:
    return tuple(read.key or str(position) for position, read in islice(reads, 3))


def refuse_doubt(plan: Plan) -> None:
    """Raise `InputChanged` if results could be credited to the wrong item."""
    old = plan.existing
    if old is None:
        return
    refuse_other(old, plan.function, plan.source.key)
    if not plan.changes.harmless or (plan.changes.new and plan.source.key is None and old.sealed):
        raise InputChanged(
            f"The items of job {plan.id} changed since it was started: {plan.changes}.{plan.changes.first}"
        )


def refuse_other(job: JobInfo, function: str, key: str | None) -> None:
    """Raise `InputChanged` if the job was started with another function or key."""
    if job.function and job.function != function:
        raise InputChanged(f"Job {job.id} was started with the function {job.function}, now it is {function}.")
    if job.keyed_by != key:
        before, now = (f"--key {key}" if key else "no --key" for key in (job.keyed_by, key))
        raise InputChanged(f"Job {job.id} was started with {before}, now there is {now}: items cannot be recognised.")


def carry_out(
    ledger: Ledger, job: Job, plan: Plan, *, max_retries: int, command: str = "", accept: bool = False
) -> None:
    """Register the planned items in ``job``, which the caller holds. It is safe to repeat after any interruption."""
    _describe(ledger, job, plan, max_retries, command)
    unchanged = plan.existing is not None and plan.existing.sealed and plan.existing.digest == plan.digest
    if not unchanged:
        if accept and plan.existing is not None:
            # Record this first: after a kill, the next run may no longer see a change to accept.
            ledger.note("accept-changes", plan.id, {"changes": str(plan.changes)})
            job.rewrite_outputs()
            (_apply_keys if plan.source.key is not None else _apply_contents)(job, plan.source)
        elif plan.source.key is not None and plan.existing is not None:
            _apply_keys(job, plan.source)  # safe: only new items, and changed ones that were never started
        else:
            # A new job, or its registration was interrupted: the known items are the same, see _compare_positions.
            known = 0 if plan.existing is None else plan.existing.total
            rest = islice(enumerate(plan.source), known, None)
            job.register(NewItem(position, read.payload, read.key, read.fingerprint) for position, read in rest)
        if plan.source.digest_read != plan.digest:
            raise InputChanged(
                f"The items of job {plan.id} changed while they were being read.", hint="Run the same command again."
            )
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


def find(ledger: Ledger | None, id: str) -> JobInfo | None:
    """Return the job with that id, or None."""
    if ledger is None:
        return None
    return next((info for info in ledger.jobs() if info.id == id), None)


# ---------------------------------------------------------------------------------------------------------------------
# By position and content


def _compare_positions(job: Job, source: Source, *, sealed: bool) -> Changes:
    known = array("q", (mark or 0 for _, _, mark in job.fingerprints()))
    now = array("q")
    first = ""
    for position, read in enumerate(source):
        if not first and position < len(known) and known[position] != read.fingerprint:
            first = f" The first difference is at {source.locate(read.number)}: {read.payload:.80}"
        if not first and sealed and position == len(known):
            first = f" The first one added is {source.locate(read.number)}: {read.payload:.80}"
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
    """Return positions in ``known`` and ``now`` whose content the other lacks, counting repeats."""
    known_at: defaultdict[int, list[int]] = defaultdict(list)
    for position, mark in enumerate(known):
        known_at[mark].append(position)
    added = []
    for position, mark in enumerate(now):
        if known_at[mark]:
            known_at[mark].pop()
        else:
            added.append(position)
    return sorted(position for left in known_at.values() for position in left), added


def _by_content(job: Job) -> tuple[defaultdict[int, list[int]], int]:
    """Return indices by content, equal items in descending order, and the next free index."""
    known_at: defaultdict[int, list[int]] = defaultdict(list)
    following = 0
    for idx, _, mark in job.fingerprints():
        known_at[mark or 0].append(idx)
        following = idx + 1
    for indices in known_at.values():
        indices.reverse()  # the first of equal items is matched first
    return known_at, following


def _apply_contents(job: Job, source: Source) -> None:
    """Keep items whose content is unchanged, drop missing ones and add new ones."""
    known_at, following = _by_content(job)

    def added() -> Iterator[NewItem]:
        nonlocal following
        for read in source:
            if known_at[read.fingerprint]:
                known_at[read.fingerprint].pop()
            else:
                yield NewItem(following, read.payload, read.key, read.fingerprint)
                following += 1

    job.register(added())
    job.drop([idx for left in known_at.values() for idx in left])


def _match_contents(job: Job, source: Source) -> Iterator[tuple[int, Read, int | None]]:
    """Yield (position, item, index of its known item or None), matched as in `_apply_contents`."""
    known_at, _ = _by_content(job)
    for position, read in enumerate(source):
        yield position, read, known_at[read.fingerprint].pop() if known_at[read.fingerprint] else None


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
    # Items that were never started simply get the new content.
    worked_on = job.worked_on(list(changed))
    changes.changed = sorted(worked_on)
    changes.new += len(changed) - len(worked_on)
    changes.gone = sorted(idx for idx, _ in known.values())
    if changes.changed:
        read = changed[changes.changed[0]]
        changes.first = f" The first changed one is {read.key!r} at {source.locate(read.number)}: {read.payload:.80}"
    elif changes.gone:
        changes.first = f" The first one gone is {next(iter(known))!r}."
    return changes


def _match_keys(job: Job, source: Source) -> Iterator[tuple[int, Read, int | None]]:
    """Yield (position, item, index of the known item with the same key and content or None)."""
    known, _ = _by_key(job)
    for position, read in enumerate(source):
        idx, mark = known.get(read.key or "", (-1, 0))
        yield position, read, idx if idx >= 0 and mark == read.fingerprint else None


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
