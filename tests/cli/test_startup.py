"""A command loads what it needs: the time it takes is in bench/startup.py, what it loads is here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.tracing import untraced_environment

#: Each of these costs milliseconds, and a list of jobs needs none of them.
NOT_FOR_A_LIST = {
    "headway.run", "headway.finishline", "headway.states", "headway.watcher", "headway.events", "headway.views.jobs.job",
    "headway.views.schemas", "headway.ledger.job", "headway.ledger.manager", "asyncio", "concurrent.futures", "difflib",
    "http.client", "multiprocessing", "psycopg", "redis", "rq", "subprocess", "tempfile", "tomllib", "unicodedata",
}  # fmt: skip


def loaded(directory: Path, code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env=untraced_environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("arguments", [["jobs"], ["jobs", "--json"], ["status"]])
def test_a_list_of_jobs_loads_no_more_than_it_shows(tmp_path: Path, ads: Path, arguments: list[str]):
    found = loaded(tmp_path, f"from headway.cli import invoke\nassert invoke({arguments!r}) == 0")
    assert "headway.views.jobs.listing" in found
    assert found & NOT_FOR_A_LIST == set()


def test_the_version_is_shown_without_a_store(tmp_path: Path):
    found = loaded(tmp_path, "from headway.cli import invoke\nassert invoke(['--version']) == 0")
    assert {name for name in found if name.startswith("headway.")} == {
        "headway._version",
        "headway.cli",
        "headway.errors",
        "headway.core",
        "headway.core.text",
    }


def test_views_know_neither_click_nor_the_command_line(tmp_path: Path):
    found = loaded(tmp_path, "import headway.views.schemas")
    assert "headway.views.jobs.listing" in found
    assert not {name for name in found if name.split(".")[0] == "click" or name.startswith("headway.cli")}


def test_a_view_cannot_be_changed():
    from headway.views.jobs.listing import Holder

    with pytest.raises(AttributeError):
        Holder("vm", 1).pid = 2  # type: ignore[misc]  # what must not be done
