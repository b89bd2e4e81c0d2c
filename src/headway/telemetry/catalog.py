"""Every metric of Headway: its kind, its labels and its help text."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """A metric as Prometheus shows it."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: str
    help: str


METRICS = {
    "headway_sql_seconds": Metric("histogram", "operation", "Duration of SQL transactions and queries."),
    "headway_sql_retries": Metric("counter", "operation", "Transactions repeated after a lock or a lost connection."),
    "headway_sql_failures": Metric("counter", "operation", "Transactions that failed after all retries."),
    "headway_sql_bytes": Metric("gauge", "engine", "Size of the database in bytes."),
    "headway_sql_connections": Metric("gauge", "engine", "Open database connections of this process."),
    "headway_redis_away": Metric("gauge", "", "1 while Redis cannot be reached, else 0."),
    "headway_redis_retries": Metric("counter", "operation", "Finish line calls repeated after a Redis failure."),
    "headway_redis_failures": Metric("counter", "operation", "Finish line calls that failed after all retries."),
    "headway_projects_restored": Metric("counter", "exact", "Projects rebuilt in Redis from SQL."),
    "headway_journal_group": Metric("histogram", "", "Finish line calls committed in one journal transaction."),
    "headway_progress_batch": Metric("histogram", "", "Projects read in one Redis round trip."),
    "headway_events": Metric("counter", "sink", "Events delivered to the sink."),
    "headway_event_failures": Metric("counter", "sink", "Failed delivery attempts."),
    "headway_event_seconds": Metric("histogram", "sink", "Duration of deliveries."),
    "headway_events_refused": Metric("counter", "sink", "Events moved to quarantine because the sink rejected them."),
    "headway_events_waiting": Metric("gauge", "outbox,sink", "Undelivered events."),
    "headway_events_oldest_seconds": Metric("gauge", "outbox,sink", "Age of the oldest undelivered event."),
    "headway_worker_deaths": Metric("counter", "", "Worker processes of runs that exited unexpectedly."),
    "headway_states_reads": Metric("counter", "result", "State reads from memory (hit) or from the store (miss)."),
    "headway_states_writes": Metric("counter", "store,result", "State writes by outcome."),
    "headway_states_write_seconds": Metric("histogram", "store", "Duration of state writes."),
    "headway_states_live_seconds": Metric("histogram", "store", "Time from a state write to this process's listener."),
    "headway_states_replay_seconds": Metric("histogram", "", "Time from subscribing to the end of the replay."),
    "headway_states_delivery_seconds": Metric("histogram", "", "Time a change waited for its subscriber."),
    "headway_states_dropped": Metric("counter", "", "Changes still waiting when their subscription was closed."),
    "headway_states_skipped": Metric(
        "counter", "", "Changes replaced by a newer one before a slow subscriber read them."
    ),
    "headway_states_listener_reconnects": Metric("counter", "store", "Reconnections of state listeners."),
    "headway_states_version_gaps": Metric("counter", "store", "State versions that a listener did not receive."),
    "headway_alerts": Metric("counter", "rule,change", "Alerts opened and closed by this process."),
    "headway_task_seconds": Metric("histogram", "kind,status", "Run time of tasks."),
    "headway_tasks_waiting": Metric("gauge", "queue", "Tasks that are ready to run."),
    "headway_tasks_running": Metric("gauge", "queue", "Tasks that are running."),
    "headway_tasks_oldest_seconds": Metric("gauge", "queue", "Waiting time of the oldest ready task."),
    "headway_workers": Metric("gauge", "", "Queue worker processes of this host."),
    "headway_worker_crashes": Metric("counter", "", "Queue worker processes that crashed and were replaced."),
    "headway_queue_redis_away": Metric("gauge", "", "1 while hints cannot be pushed to Redis, else 0."),
    "headway_queue_redis_memory": Metric("gauge", "", "Used share of Redis's memory limit, 0 to 1."),
    "headway_queue_refused": Metric("counter", "", "Foreign jobs found in Headway's RQ queues."),
    "headway_web_requests": Metric("counter", "status", "HTTP requests by status class, 2xx to 5xx."),
    "headway_web_wait_seconds": Metric("histogram", "", "Time a read waited for a free thread."),
    "headway_web_live": Metric("gauge", "", "Open live connections."),
    "headway_web_snapshot_seconds": Metric("histogram", "", "Time to read the changes for live connections."),
    "headway_watcher_events": Metric("counter", "queue,kind", "Events published by the RQ watcher."),
}
