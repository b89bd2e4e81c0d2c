"""The finish line: counters of a project in Redis that tell, once, when all of it is through.

    line = FinishLine("redis://localhost/1", database="postgresql://headway@db/headway")
    line.create("site-7")
    line.set_status("site-7", Status.CRAWLING)          # it cannot finish while items are still being discovered
    line.item_done("site-7", "page-1")                  # from any process, any number of times
    line.item_failed("site-7", "page-2", error="404")
    line.finish_crawl("site-7", total=2).completed      # True: this call was the one that finished it

Every change is one Lua script: it counts by identity, refreshes the lifetime, looks at the finish line and, where
that is crossed, appends ``job.completed`` to the outbox stream. So one call per project answers COMPLETED, also
when replies are lost and calls repeated, and the event exists exactly when the project is DONE. A `Relay` delivers the
event at least once, with a fixed id.

Redis alone is as durable as that Redis is. With ``database`` the project's record is in SQL: it can be created while
Redis is away, is checkpointed every 5 s and rebuilt when Redis lost it. With ``journal=True`` each count is committed
to SQL before it is acknowledged, and what is rebuilt is exact.

    line          `FinishLine`, what a program calls
    progress      the words: statuses, outcomes, what makes an item the same item
    callers       who a script takes a call for: its name, number and connection
    server        the state server as this process sees it: tries again, fails fast, alerts, drains
    records       the SQL record of each project        journal  every count, committed before it is acknowledged
    rebuild       putting a project (back) into Redis   checkpointer  the rounds that keep the two together
    async_progress  progress for event loops
"""

from headway.finishline.async_progress import AsyncProgress
from headway.finishline.line import FinishLine
from headway.finishline.progress import Answer, Outcome, Progress, Status

__all__ = ["Answer", "AsyncProgress", "FinishLine", "Outcome", "Progress", "Status"]
