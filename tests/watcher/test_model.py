"""Registries edited at random, notifications dropped at random: what is told against what happened."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.watcher.fakes import Stand

JOBS = st.sampled_from(["a", "b", "c", "d", "e", "f", "g"])


class RegistryEdits(RuleBasedStateMachine):
    """Jobs fail, are requeued and fail again; the key is deleted, renamed away, or replaced; the watcher restarts.

    RQ's record (the results) says which failures there were. Those of jobs that stand in the failed registry when the
    watcher looks must have been told, and none is ever told twice.
    """

    @initialize(page_size=st.sampled_from([2, 3, 50]))
    def begin(self, page_size: int) -> None:
        self.stand = Stand(page_size=page_size).open()
        self.page_size = page_size
        self.happened = 0
        self.forever: set[str] = set()

    def delivered(self) -> Counter[str]:
        return Counter(json.loads(body)["data"]["execution_id"] for body in self.stand.redis.published)

    def announce(self, command: str, *, heard: bool) -> None:
        if heard:
            self.stand.redis.announce("F", command)

    @rule(job=JOBS, place=st.floats(0, 1e6), kept_forever=st.booleans(), heard=st.booleans())
    def fails(self, job: str, place: float, kept_forever: bool, heard: bool) -> None:
        self.happened += 1
        result = f"{1_000_000_000 + self.happened}-0"
        score = -1.0 if kept_forever else 2e6 + place
        changed = self.stand.redis.zsets["F"].get(job) != score
        self.stand.redis.fail(job, result, score=score)
        if changed:  # an unchanged score is not announced
            self.announce("zadd", heard=heard)
        if kept_forever:
            self.forever.add(job)

    @rule(job=JOBS, heard=st.booleans())
    def is_requeued(self, job: str, heard: bool) -> None:
        if self.stand.redis.zsets["F"].pop(job, None) is not None:
            self.announce("zrem", heard=heard)

    @rule()
    def registry_is_deleted(self) -> None:
        self.stand.redis.zsets["F"] = {}

    @rule(heard=st.booleans())
    def lowest_entry_expires(self, heard: bool) -> None:
        members = self.stand.redis.zsets["F"]
        if members:
            del members[min(members, key=lambda member: members[member])]
            self.announce("zremrangebyscore", heard=heard)

    @rule()
    def watcher_works(self) -> None:
        self.stand.pass_time(5)

    @precondition(lambda self: self.page_size == 50)
    @rule()
    def sweep_finds_everything(self) -> None:
        self.stand.pass_time(601)
        # A failure kept for ever has the score -1 each time: without a word about its removal only a start tells.
        self.check_told(set(self.stand.redis.zsets["F"]) - self.forever)

    @rule()
    def restart_finds_everything(self) -> None:
        self.stand.restart()
        self.check_told(set(self.stand.redis.zsets["F"]))

    def check_told(self, jobs: set[str]) -> None:
        told = self.delivered()
        for job in jobs:
            for result in self.stand.redis.records[job].results:
                assert told[result.execution_id] == 1, f"{job}: {result.id}"

    @invariant()
    def nothing_is_told_twice(self) -> None:
        assert all(count == 1 for count in self.delivered().values())


@pytest.mark.req("S4-19")
def test_every_fact_is_reported_once_despite_lost_announcements():
    RegistryEdits.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
    RegistryEdits.TestCase("runTest").runTest()
