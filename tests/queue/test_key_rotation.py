"""Keys that change in headway.toml while processes use the queue."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from headway.config import Config
from headway.core.lifecycle import Shutdown
from headway.queue.payload import FernetCodec
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()
Use = Callable[..., None]


@pytest.fixture
def use(tmp_path: Path) -> Use:
    def write(*keys: str, more: str = "") -> None:
        """Replace the settings by these keys."""
        text = f'database = "sqlite:///{tmp_path}/tasks.db"\nqueue_keys = {json.dumps(keys)}\n{more}'
        (tmp_path / "headway.toml").write_text(text)

    write(OLD)
    return write


def process(directory: Path) -> TaskQueue:
    """Make the queue of another process of the application."""
    made = TaskQueue.from_settings(Config(directory=directory, environment={}))
    made.handler("echo", isolation="none")(lambda task, payload: payload)
    return made


@pytest.fixture
def queue(tmp_path: Path, use: Use) -> Iterator[TaskQueue]:
    """A queue of a process that has used the first key a moment ago."""
    with process(tmp_path) as made:
        made.submit("echo", "before the rotation")
        Worker(made, shutdown=Shutdown()).tick()
        yield made


def joined(queue: TaskQueue, path: Path) -> str:
    with sqlite3.connect(path / "tasks.db") as connection:
        return queue.submit("echo", "secret", connection=connection).id


@pytest.mark.req("S2-58")
@pytest.mark.parametrize(
    "submit",
    [
        lambda queue, path: queue.submit("echo", "secret").id,
        lambda queue, path: queue.submit_many([{"kind": "echo", "payload": "secret"}])[0].id,
        joined,
    ],
    ids=["submit", "submit_many", "connection"],
)
def test_a_process_that_was_idle_during_a_rotation_encrypts_with_the_new_key(
    queue: TaskQueue, tmp_path: Path, use: Use, submit: Callable[[TaskQueue, Path], str]
):
    use(NEW)
    id = submit(queue, tmp_path)
    [(stored,)] = queue.database.all("SELECT payload FROM tasks WHERE id = ?", (id,))
    assert json.loads(FernetCodec([NEW]).decode(id, stored)) == "secret"
    with process(tmp_path) as other:
        Worker(other, shutdown=Shutdown()).tick()
        assert other.get(id).status is Status.COMPLETED
        assert other.result(id) == "secret"


def test_a_process_that_decodes_reads_the_new_key_first(queue: TaskQueue, tmp_path: Path, use: Use):
    use(NEW)
    with process(tmp_path) as other:
        id = other.submit("echo", "secret").id
        [(stored,)] = other.database.all("SELECT payload FROM tasks WHERE id = ?", (id,))
    assert json.loads(queue.backend.decode(id, stored)) == "secret"


def test_a_result_is_encrypted_with_the_key_of_the_moment_it_was_returned(tmp_path: Path, use: Use):
    with process(tmp_path) as queue:

        @queue.handler("rotate", isolation="none")
        def rotate(task: object, payload: object) -> str:
            use(NEW, OLD)
            return "secret"

        id = queue.submit("rotate").id
        Worker(queue, shutdown=Shutdown()).tick()
        [(stored,)] = queue.database.all("SELECT result FROM tasks WHERE id = ?", (id,))
        assert json.loads(FernetCodec([NEW]).decode(f"{id} result", stored)) == "secret"


@pytest.mark.parametrize("text", ["", "queue_keys = []\n", None], ids=["truncated", "no keys", "deleted"])
def test_a_file_without_keys_turns_encryption_off_only_at_the_next_start(
    queue: TaskQueue, tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "headway.toml"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    id = queue.submit("echo", "secret").id
    [(stored,)] = queue.database.all("SELECT payload FROM tasks WHERE id = ?", (id,))
    assert stored.startswith("fernet:")
    assert [record for record in caplog.records if "no longer has queue_keys" in record.message]


def test_a_process_that_changed_its_directory_follows_the_file_it_began_with(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWAY_DATABASE", raising=False)
    with TaskQueue.from_settings() as queue:
        queue.handler("echo")(lambda task, payload: payload)
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        use(NEW)
        id = queue.submit("echo", "secret").id
        [(stored,)] = queue.database.all("SELECT payload FROM tasks WHERE id = ?", (id,))
        assert json.loads(FernetCodec([NEW]).decode(id, stored)) == "secret"


def test_another_reader_of_the_same_settings_does_not_consume_the_change(tmp_path: Path, use: Use):
    config = Config(directory=tmp_path, environment={})
    with TaskQueue.from_settings(config) as queue:
        queue.handler("echo")(lambda task, payload: payload)
        use(NEW)
        assert config.reload_if_changed()
        id = queue.submit("echo", "secret").id
        [(stored,)] = queue.database.all("SELECT payload FROM tasks WHERE id = ?", (id,))
        assert json.loads(FernetCodec([NEW]).decode(id, stored)) == "secret"


def test_a_task_written_with_a_key_that_the_worker_is_about_to_read_is_run(tmp_path: Path):
    """A web process may have read the file two seconds before the worker does."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    file = tmp_path / "headway.toml"

    def use(*keys: str) -> None:
        file.write_text(f'database = "sqlite:///{tmp_path}/tasks.db"\nqueue_keys = "{" ".join(keys)}"\n')

    use(old)
    with TaskQueue.from_settings(Config(directory=tmp_path, environment={})) as mine:
        mine.handler("echo", isolation="none")(lambda task, payload: payload)
        worker = Worker(mine, shutdown=Shutdown())
        worker.tick()  # it looked just now
        use(new, old)
        with TaskQueue.from_settings(Config(directory=tmp_path, environment={})) as theirs:
            theirs.handler("echo", isolation="none")(lambda task, payload: payload)
            task = theirs.submit("echo", "secret")
        worker.tick()
        assert mine.get(task.id).status is Status.COMPLETED
