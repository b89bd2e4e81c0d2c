"""The finish line: counters of projects in Redis that report, exactly once, when a project is complete.

    line = FinishLine("redis://localhost/1", database="postgresql://headway@db/headway")
    line.create("site-7")
    line.set_status("site-7", Status.CRAWLING)          # it cannot complete while items are discovered
    line.item_done("site-7", "page-1")                  # from any process, any number of times
    line.item_failed("site-7", "page-2", error="404")
    line.finish_crawl("site-7", total=2).completed      # True: this call completed the project

Every change is one Lua script. It counts by identity, extends the lifetime, decides whether the project is complete, and
then appends ``job.completed`` to the outbox stream. So exactly one call per project answers COMPLETED, also after lost replies
and repeated calls, and the event exists exactly if the project is DONE. A `Relay` delivers the event at least once, with a
fixed id.

Without a database the counts are as durable as Redis. With ``database`` the record of a project is in SQL: it can be created
while Redis is away, gets a checkpoint every 5 s and is rebuilt after Redis lost it. With ``journal=True`` each count is
committed to SQL before it is acknowledged, and a rebuilt project is exact.

    line         `FinishLine`, the interface for programs     progress      statuses, outcomes, identity of items
    commands     one script per call, answered exactly once   callers       the identities of those calls
    creation     create and delete a project                  rebuild       put projects into Redis
    server       retries, circuit breaker, alerts             operations    running calls, awaited by a shutdown
    store        the SQL record, journal and deliveries       checkpointer  keeps Redis and SQL consistent
    async_progress  progress for event loops
"""

from headway.finishline.async_progress import AsyncProgress
from headway.finishline.line import FinishLine
from headway.finishline.progress import Answer, Outcome, Progress, Status

__all__ = ["Answer", "AsyncProgress", "FinishLine", "Outcome", "Progress", "Status"]
