"""Limits on concurrency and rate, per kind and per user."""

from __future__ import annotations

import pytest

from headway.queue.store import hints as hinting
from headway.queue.task_queue import TaskQueue
from tests.queue.claiming import take, worker


@pytest.mark.req("S2-46")
def test_a_kind_that_has_used_up_its_rate_does_not_hold_up_the_others(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"} for _ in range(5)])
    crowd.submit("resize", id="other")
    crowd.limit("kind", "caption", rate=0.001)
    assert [claim.kind for claim in take(crowd)] == ["caption"]
    assert [claim.id for claim in take(crowd)] == ["other"]
    assert not take(crowd, 5, worker("w2"))


@pytest.mark.req("S2-46")
def test_a_limit_of_none_for_everybody_leaves_those_with_a_limit_of_their_own(crowd: TaskQueue):
    for user in ("anna", "bert", "cora", None):
        crowd.submit_many([{"kind": "caption", "user_id": user, "id": f"{user}-{n}"} for n in range(2)])
    crowd.limit("user", concurrency=0)
    crowd.limit("user", "cora", concurrency=1)
    assert [claim.id for claim in take(crowd, 8)] == ["cora-0", "None-0", "None-1"]
    crowd.limit("user")
    assert len(take(crowd, 8)) == 4


def test_rq_is_not_told_of_what_has_used_up_its_rate(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"} for _ in range(3)])
    crowd.submit("resize", id="other")
    crowd.limit("kind", "caption", rate=0.001)
    take(crowd)
    assert crowd.database.run(lambda tx: hinting.unhinted(tx, limit=10)) == [("other", "normal")]


def test_more_users_who_used_up_their_rate_than_a_statement_takes_parameters_hold_up_nobody(crowd: TaskQueue):
    crowd.limit("user", rate=0.00001)
    crowd.database.run(
        lambda tx: tx.execute(
            "WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 66000) "
            "INSERT INTO task_rates (scope, key, allowance, at) SELECT 'user', 'user-' || n, 0.0, ? FROM numbers",
            (tx.now(),),
        )
    )
    crowd.submit("caption", user_id="user-7")
    free = crowd.submit("caption", user_id="anna")
    assert [claim.id for claim in take(crowd, 2)] == [free.id]
