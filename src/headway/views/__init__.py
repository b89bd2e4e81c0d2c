"""What people and programs read: plain frozen values with a stable JSON.

    shape      what a view is, and how it becomes JSON
    jobs       the jobs
    job        one job: its runs, its causes of failure
    items      items, one item with its history, the log of a job
    dead       dead letters by cause
    projects   how far a project of the finish line is
    states     the states of a job's tasks
    health     what `headway doctor` looks at
    records    the audit trail, the settings
    access     who may use the web application, and what they did
    reading    all of these questions as methods of one object, over the stores of an installation
    schemas    every document as a JSON schema (loaded by the documentation and by tests, not by a command)

A module here asks the parts below and answers with views. It prints nothing and knows neither click nor HTTP: the
command line writes these values as text or JSON, a web API answers with the same JSON. Each document has a ``schema``
(``headway.jobs/1``); within a version keys are added, never changed or removed.
"""
