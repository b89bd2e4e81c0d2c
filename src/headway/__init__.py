"""Durable progress for long work in many processes.

    import headway

    result = headway.map(make_ad, products, job="ads-november")     # resumable; one SQLite file

    with headway.open_job("ads-november") as job:                   # or hold the loop yourself
        for item in job.remaining():
            with item:
                make_ad(item.payload)

`FinishLine` counts the progress of many programs in Redis. `headway.states` tracks the states of a job's partitions.
`headway.watcher` reports failures of RQ jobs.

Names are imported on first use, so that ``import headway`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway._version import __version__

if TYPE_CHECKING:
    from headway.core.retry_after import retry_after as retry_after
    from headway.errors import HeadwayError as HeadwayError
    from headway.errors import RetryLater as RetryLater
    from headway.finishline import FinishLine as FinishLine
    from headway.ledger import Ledger as Ledger
    from headway.ledger import ProgressManager as ProgressManager
    from headway.run import GiveUp as GiveUp
    from headway.run import Result as Result
    from headway.run import amap as amap
    from headway.run import map as map  # noqa: A004 - users read headway.map
    from headway.run import open_job as open_job
    from headway.run import track as track


#: Public name -> module that defines it.
_PLACES = {
    "HeadwayError": "headway.errors",
    "RetryLater": "headway.errors",
    "retry_after": "headway.core.retry_after",
    "FinishLine": "headway.finishline",
    "Ledger": "headway.ledger",
    "ProgressManager": "headway.ledger",
    "GiveUp": "headway.run",
    "Result": "headway.run",
    "amap": "headway.run",
    "map": "headway.run",
    "open_job": "headway.run",
    "track": "headway.run",
}

__all__ = [  # noqa: PLE0604 - exactly the names above
    "__version__",
    *_PLACES,
]


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'headway' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_PLACES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
