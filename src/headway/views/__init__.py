"""Views: what people and programs read, as plain frozen values with a stable JSON.

    shape      what a view is, and its conversion to JSON
    jobs       jobs, one job, items, dead letters, the item map, durations, rate and forecast
    overview   the jobs in progress, the outlook of the queues, causes over all jobs
    search     search over everything, failures by host, causes over all jobs
    history    marks for charts: starts, stops, pauses, kills and changed settings
    queue      queues, tasks, workers
    failed     failed tasks and failed RQ jobs by cause
    projects   projects of the finish line
    states     the states of a job's tasks
    system     alerts, health, performance, relay, audit trail, settings, tokens
    reading    `Reader`: all of these as methods of one object
    schemas    the JSON schemas of all documents; only the documentation and tests import it

Every number and state that people read is defined here, once. The command line prints these values as text or JSON, and
the web API returns the same JSON. Each document has a ``schema`` (``headway.jobs/1``); within a version keys are added,
never changed or removed. No module here prints, and none imports click or an HTTP package.
"""
