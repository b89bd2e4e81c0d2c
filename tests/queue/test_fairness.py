"""Users take turns, also after delays, retries and tasks given back."""

from __future__ import annotations

from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.task_queue import TaskQueue
from tests.queue.claiming import complete, fail, take, worker


def served(queue: TaskQueue, count: int) -> list[str | None]:
    """Whose tasks are handed out next, one after the other."""
    return [claim.user_id for n in range(count) for claim in take(queue, who=worker(f"w{n}"))]


def wait_is_over(queue: TaskQueue) -> None:
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = 0 WHERE ready = 0"))


def test_a_user_whose_many_tasks_are_for_tomorrow_gets_their_turn_today(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna", "delay": 86_400.0} for _ in range(20))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(10))
    crowd.submit("caption", user_id="anna")
    assert served(crowd, 3).count("anna") == 1


def test_delayed_tasks_that_become_ready_take_turns_with_those_that_came_meanwhile(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(30))
    for claim in take(crowd, 29):
        complete(crowd, claim)
    crowd.submit("caption", user_id="cleo", delay=60.0)  # its turn would be the 30th
    take(crowd)
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(20))
    wait_is_over(crowd)
    assert "cleo" in served(crowd, 3)


def test_many_tasks_that_become_ready_together_do_not_go_before_another_users_first(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna", "delay": 60.0} for _ in range(10))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(3))
    wait_is_over(crowd)
    assert served(crowd, 6).count("ben") == 3


def test_a_retry_that_is_due_lets_nobody_in_before_those_who_wait(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(30))
    first, *others = take(crowd, 20)
    for claim in others:
        complete(crowd, claim)
    fail(crowd, first)
    wait_is_over(crowd)
    crowd.database.run(lambda tx: claims.promote(tx, tx.now()))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(15))
    assert served(crowd, 7).count("anna") >= 3


def test_tasks_that_an_operator_tries_again_take_their_turn(crowd: TaskQueue):
    crowd.submit_many({"kind": "resize", "user_id": "anna"} for _ in range(10))
    failed = take(crowd, 10)
    for claim in failed:
        fail(crowd, claim)
    crowd.submit_many({"kind": "caption", "user_id": "cleo"} for _ in range(30))
    take(crowd, 20)
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(3))
    for claim in failed:
        crowd.retry(claim.id)
    assert served(crowd, 9).count("ben") == 3


def test_a_users_tasks_that_are_given_back_together_stand_one_behind_the_other(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(10))
    held = take(crowd, 10)
    crowd.database.run(lambda tx: outcomes.release_all(tx, held))
    crowd.submit("caption", user_id="ben")
    assert "ben" in [claim.user_id for claim in take(crowd, 2)]
