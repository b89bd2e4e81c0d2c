"""The ledger: the items of each job, their outcomes, and the completion of the job.

    Ledger ── Job ── items ── attempts, dead letters, causes
       │        └── Recorder: the job's counters, open in one transaction
       └── Hold: the process that runs it

`ProgressManager` is the ledger for one job in one SQLite file, with the API of the original requirements document.
Names are imported on first use, so that listing jobs does not load the recording code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.core.failure import Failure, describe, normalise
    from headway.ledger.content import canonical, fingerprint
    from headway.ledger.job import Job
    from headway.ledger.job_lease import Hold
    from headway.ledger.ledger import Ledger
    from headway.ledger.manager import ProgressManager
    from headway.ledger.values import (
        Attempt,
        Cause,
        DeadLetter,
        Done,
        Failed,
        Item,
        ItemInfo,
        JobInfo,
        Later,
        NewItem,
        Outcome,
        Progress,
        Recorded,
        Run,
    )

__all__ = [
    "Attempt", "Cause", "DeadLetter", "Done", "Failed", "Failure", "Hold", "Item", "ItemInfo", "Job", "JobInfo",
    "Later", "Ledger", "NewItem", "Outcome", "Progress", "ProgressManager", "Recorded", "Run", "canonical", "describe",
    "fingerprint", "normalise",
]  # fmt: skip

_HOMES = {
    name: f"{__name__}.{module}" if module != "failure" else "headway.core.failure"
    for module, names in {
        "failure": "Failure describe normalise",
        "content": "canonical fingerprint",
        "job_lease": "Hold",
        "job": "Job",
        "manager": "ProgressManager",
        "ledger": "Ledger",
        "values": "Attempt Cause DeadLetter Done Failed Item ItemInfo JobInfo Later NewItem Outcome Progress Recorded Run",
    }.items()
    for name in names.split()
}


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found  # later lookups find it without __getattr__
        return found
