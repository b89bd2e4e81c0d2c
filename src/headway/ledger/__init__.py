"""The ledger: which items of which job are done, which failed and why, that a job finished (once).

    Ledger ── Job ── items ── attempts, dead letters, causes
       │        └── Books: the job's counters, open in one transaction
       └── Hold: who runs it

`ProgressManager` is the ledger for one job of one SQLite file, in the shape of its source document.
"""

from headway.ledger.fault import describe, normalise
from headway.ledger.holding import Hold
from headway.ledger.job import Job
from headway.ledger.manager import ProgressManager
from headway.ledger.records import Ledger
from headway.ledger.values import (
    Attempt,
    Cause,
    DeadLetter,
    Done,
    Failed,
    Fault,
    Item,
    ItemInfo,
    JobInfo,
    NewItem,
    Outcome,
    Progress,
    Recorded,
    Run,
    canonical,
    fingerprint,
)

__all__ = [
    "Attempt",
    "Cause",
    "DeadLetter",
    "Done",
    "Failed",
    "Fault",
    "Hold",
    "Item",
    "ItemInfo",
    "Job",
    "JobInfo",
    "Ledger",
    "NewItem",
    "Outcome",
    "Progress",
    "ProgressManager",
    "Recorded",
    "Run",
    "canonical",
    "describe",
    "fingerprint",
    "normalise",
]
