"""What is shown has no secrets in it, whichever view shows it."""

from __future__ import annotations

import json
from pathlib import Path

from headway.ledger import Ledger, NewItem
from headway.views.jobs.items import read_item
from headway.views.jobs.job import read_runs, read_sheet
from headway.views.jobs.listing import read_jobs
from headway.views.shape import Document
from headway.views.system.records import shown

SECRET = "hunter2-hunter2"


def test_no_view_of_a_job_shows_a_password(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.create("ads")
        ledger.describe(
            job, function="ads:make_ad", source=f"https://me:{SECRET}@h/items.jsonl",
            command=f"headway run ads:make_ad --database postgresql://me:{SECRET}@db/x", keyed_by=None, max_retries=1,
        )  # fmt: skip
        job.register([NewItem(0, json.dumps({"api_token": SECRET, "deep": [{"password": SECRET}]}))])
        hold = ledger.hold(job, {"database": f"postgresql://me:{SECRET}@db/x"})
        ledger.release(hold, "interrupted")
        documents: list[Document] = [
            read_jobs(ledger.database), read_sheet(job), read_runs(job), read_item(job, "0"), read_item(job, "0", payload=True),
        ]  # fmt: skip
        texts = [json.dumps(document.as_json()) for document in documents]
    assert all(SECRET not in text for text in texts)
    assert all("***" in text for text in (*texts[:3], texts[4]))


def test_a_setting_that_may_hold_a_secret_is_shown_without_it():
    settings: dict[str, str | tuple[str, ...]] = {
        "webhook": f"https://hooks.example.org/services/{SECRET}",
        "redis": f"redis://:{SECRET}@h/0",
        "api_token": SECRET,
        "sinks": ("log:", f"https://hooks.example.org/{SECRET}", f"http://[::1/{SECRET}"),
    }
    for name, value in settings.items():
        assert SECRET not in str(shown(name, value))
    assert shown("retries", 2) == 2
    assert shown("mode", "process") == "process"
