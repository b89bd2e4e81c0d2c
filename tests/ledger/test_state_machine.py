"""Any sequence of calls, crashes and reopenings leaves the ledger as a plain dict says it should be."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headway import ProgressManager
from headway.errors import StaleClaim
from headway.ledger import Item

MAX_RETRIES = 2
indices = st.integers(0, 11)


class Machine(RuleBasedStateMachine):
    """The model: for each known item how often it failed, and whether it is done or dead."""

    claims = Bundle("claims")

    @initialize()
    def open(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="headway-machine-"))
        self.generation = 0
        self.progress = ProgressManager(self._path(), MAX_RETRIES)
        self.failures: dict[int, int] = {}
        self.runs: dict[int, int] = {}
        self.done: set[int] = set()
        self.dead: set[int] = set()
        self.token: dict[int, int] = {}

    def _path(self) -> Path:
        return self.directory / f"{self.generation}.db"

    def teardown(self) -> None:
        if hasattr(self, "progress"):
            self.progress.close()
            shutil.rmtree(self.directory)

    # ---- rules -----------------------------------------------------------------------------------------------------

    @rule(items=st.lists(indices, max_size=5))
    def register(self, items: list[int]) -> None:
        new = {idx for idx in items if idx not in self.failures}
        assert self.progress.register(items) == len(new)
        self.failures.update(dict.fromkeys(new, 0))

    @rule(idx=indices)
    def mark_done(self, idx: int) -> None:
        self.progress.mark_done(idx, {"n": idx})
        self._finish(idx)

    @rule(items=st.lists(indices, max_size=6))
    def mark_many(self, items: list[int]) -> None:
        fresh = set(items) - self.done
        assert self.progress.mark_many([(idx, None) for idx in items]) == len(fresh)
        for idx in items:
            self._finish(idx)

    @rule(idx=indices)
    def mark_failed(self, idx: int) -> None:
        self.progress.mark_failed(idx, {"error": f"failed {idx}"})
        self._fail(idx)

    @rule(target=claims, limit=st.integers(1, 3))
    def claim(self, limit: int) -> list[Item]:
        items = self.progress.claim("w", limit=limit, lease=10_000)
        open_ = {idx for idx in self.failures if idx not in self.done | self.dead and idx not in self.token}
        assert len(items) == min(limit, len(open_))
        for item in items:
            assert item.idx in open_
            assert item.token is not None
            self.token[item.idx] = item.token
        return items

    @rule(items=claims, succeeds=st.booleans())
    def finish_claimed(self, items: list[Item], succeeds: bool) -> None:
        for item in items:
            mark = self.progress.mark_done if succeeds else self.progress.mark_failed
            holds = self.token.get(item.idx) == item.token
            try:
                mark(item.idx, {"error": "x"}, token=item.token)
            except StaleClaim:
                assert not holds
                assert item.idx not in self.done
                continue
            if item.idx not in self.done:
                assert holds
                (self._finish if succeeds else self._fail)(item.idx)

    @rule()
    def retry_dead(self) -> None:
        assert self.progress.retry_dead() == len(self.dead)
        for idx in self.dead:
            self.failures[idx] = 0
        self.dead.clear()

    @rule()
    def reopen(self) -> None:
        self.progress.close()
        self.progress = ProgressManager(self._path(), MAX_RETRIES)

    @rule()
    def lose_power(self) -> None:
        """What a power cut leaves: the files as they are on disk while the connection is open."""
        self.generation += 1
        for suffix in ("", "-wal"):
            old = Path(f"{self.directory / str(self.generation - 1)}.db{suffix}")
            if old.exists():
                shutil.copy(old, f"{self._path()}{suffix}")
        self.progress.close()
        self.progress = ProgressManager(self._path(), MAX_RETRIES)

    def _finish(self, idx: int) -> None:
        self.failures.setdefault(idx, 0)
        self.token.pop(idx, None)
        self.done.add(idx)
        self.dead.discard(idx)

    def _fail(self, idx: int) -> None:
        self.failures.setdefault(idx, 0)
        if idx in self.done:
            return
        self.token.pop(idx, None)
        self.failures[idx] += 1
        self.runs[idx] = self.runs.get(idx, 0) + 1
        if self.failures[idx] > MAX_RETRIES:
            self.dead.add(idx)

    # ---- what must always hold -------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_agrees(self) -> None:
        if not hasattr(self, "progress"):
            return
        info = self.progress.job.info()
        waiting = {idx for idx, count in self.failures.items() if count and idx not in self.done | self.dead}
        assert (info.total, info.done, info.dead) == (len(self.failures), len(self.done), len(self.dead))
        assert info.failed == len(waiting)
        assert info.failures == sum(self.runs.values())
        assert set(self.progress.pending()) == set(self.failures) - self.done - self.dead
        assert {letter.idx for letter in self.progress.dead_letters()} == self.dead
        assert {idx for idx in self.failures if self.progress.is_done(idx)} == self.done


@pytest.mark.timeout(300)
@pytest.mark.req("S3-21", "S3-22", "S3-23")
def test_the_ledger_equals_its_model_after_any_sequence_of_calls_and_crashes():
    run_state_machine_as_test(Machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))
