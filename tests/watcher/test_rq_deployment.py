"""The whole on a real Redis with real RQ workers."""

from __future__ import annotations

import os
import signal

import pytest
from rq import Retry
from rq.command import send_stop_job_command
from rq.job import JobStatus

from headway.watcher.adapters import requeue_failed
from tests.services.waiting import eventually
from tests.watcher.scene import Scene


@pytest.mark.req("S4-04", "S4-08")
def test_a_job_that_raises_is_reported_once_with_its_exception(scene: Scene):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("fail", "no digits here")
        (event,) = scene.events.expect((job.id, "failed"))
    assert event["type"] == "digits.train.failed.v1"
    assert event["data"]["error_kind"] == "system"
    assert event["data"]["message"] == "tests.watcher.work.Boom: no digits here"
    assert event["data"]["error_type"] == "tests.watcher.work.Boom"
    assert event["data"]["execution_id"]
    assert event["data"]["queue"] == "digits"


@pytest.mark.req("S4-08")
def test_a_job_with_retries_is_reported_only_at_its_permanent_failure(scene: Scene):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("fail", retry=Retry(max=2))
        scene.events.expect((job.id, "failed"))
        job.refresh()
    assert job.retries_left == 0
    assert scene.events.hear() == scene.events.all[:1]


@pytest.mark.req("S4-05", "S4-09")
def test_canceling_a_queued_job_is_reported_as_a_users_request(scene: Scene):
    with scene.watching():
        job = scene.enqueue("succeed")
        job.cancel()
        (event,) = scene.events.expect((job.id, "canceled"))
    assert event["data"]["error_kind"] == "user"
    assert event["data"]["message"] == "Job canceled"
    assert event["data"]["running"] is False


@pytest.mark.parametrize(("then", "kind", "type"), [("succeed", "finished", "outcome"), ("fail", "failed", "failed")])
def test_canceling_a_running_job_is_reported_and_so_is_its_outcome(scene: Scene, then, kind, type):
    scene.worker()
    with scene.watching():
        job, flag = scene.hang(then=then)
        job.cancel()
        (canceled,) = scene.events.expect((job.id, "canceled"))
        assert canceled["data"]["running"] is True
        flag.touch()
        canceled, ended = scene.events.expect((job.id, "canceled"), (job.id, kind))
    assert ended["type"] == f"digits.train.{type}.v1"
    assert ended["data"]["follows"] == canceled["id"]
    assert ended["data"]["execution_id"] == canceled["data"]["execution_id"]


def test_a_stopped_job_is_reported_as_a_users_request(scene: Scene):
    scene.worker()
    with scene.watching():
        job, _ = scene.hang()
        send_stop_job_command(scene.raw, job.id)
        (event,) = scene.events.expect((job.id, "stopped"))
    assert event["data"]["error_kind"] == "user"


@pytest.mark.req("S4-11")
def test_a_hung_job_is_reported_as_stuck_and_later_as_finished(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=1.0):
        job, flag = scene.hang(job_timeout=-1)
        (stuck,) = scene.events.expect((job.id, "stuck"))
        flag.touch()
        stuck, finished = scene.events.expect((job.id, "stuck"), (job.id, "finished"))
    assert stuck["data"]["error_kind"] == "system"
    assert finished["data"]["follows"] == stuck["id"]


def test_a_stuck_job_that_fails_later_is_reported_with_the_earlier_event(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=1.0):
        job, flag = scene.hang(job_timeout=-1, then="fail")
        scene.events.expect((job.id, "stuck"))
        flag.touch()
        stuck, failed = scene.events.expect((job.id, "stuck"), (job.id, "failed"))
    assert failed["data"]["follows"] == stuck["id"]


def test_a_stuck_job_that_ends_without_a_trace_is_reported_as_gone(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=1.0):
        job, flag = scene.hang(job_timeout=-1, result_ttl=0)
        scene.events.expect((job.id, "stuck"))
        flag.touch()
        scene.events.expect((job.id, "stuck"), (job.id, "gone"))


def test_a_job_that_may_run_longer_than_the_stuck_timeout_is_left_to_its_own_timeout(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=0.5):
        job, _ = scene.hang(job_timeout=2)
        (event,) = scene.events.expect((job.id, "failed"))
    assert "JobTimeoutException" in event["data"]["error_type"]


def test_a_killed_work_horse_is_reported_as_killed(scene: Scene):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("die")
        (event,) = scene.events.expect((job.id, "killed"))
    assert event["data"]["error_kind"] == "system"
    assert "signal 9" in event["data"]["message"]


def test_a_killed_worker_is_reported_as_lost_once(scene: Scene):
    worker = scene.worker(lease=2)
    with scene.watching(stuck_job_timeout_s=4.0):  # such a watcher reads the started registry every second
        job, _ = scene.hang()
        scene.kill_group(worker)
        (lost,) = scene.events.expect((job.id, "lost"))
        scene.queue.started_job_registry.cleanup()
        eventually(lambda: scene.redis.zcard("rq:failed:digits") == 1)
        other = scene.enqueue("succeed")
        other.cancel()  # once this is told, the clean-up has been seen too
        scene.events.expect((job.id, "lost"), (other.id, "canceled"))
    assert lost["data"]["error_kind"] == "system"
    assert lost["data"]["execution_id"]


def test_a_lost_job_that_rq_requeues_is_reported_as_retried(scene: Scene):
    worker = scene.worker(lease=2)
    with scene.watching(stuck_job_timeout_s=4.0):  # such a watcher reads the started registry every second
        job, _ = scene.hang(retry=Retry(max=1))
        scene.kill_group(worker)
        scene.events.expect((job.id, "lost"))
        scene.queue.started_job_registry.cleanup()
        scene.events.expect((job.id, "lost"), (job.id, "retried"))


def test_a_worker_lost_without_a_watcher_is_reported(scene: Scene):
    worker = scene.worker(lease=1)
    job, _ = scene.hang()
    scene.kill_group(worker)

    def cleaned() -> bool:
        scene.queue.started_job_registry.cleanup()
        return bool(scene.redis.zcard("rq:failed:digits"))

    eventually(cleaned)
    with scene.watching():
        scene.events.expect((job.id, "lost"))


@pytest.mark.parametrize("failure_ttl", [None, -1])
def test_a_requeued_job_that_fails_again_is_reported_again(scene: Scene, failure_ttl):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("fail", failure_ttl=failure_ttl)
        for times in range(1, 4):
            scene.events.expect(*[(job.id, "failed")] * times)
            scene.queue.failed_job_registry.requeue(job.id)
        scene.events.expect(*[(job.id, "failed")] * 4)
    assert len({event["id"] for event in scene.events.all}) == 4


def test_a_job_with_failure_ttl_0_is_reported_with_its_remaining_fields(scene: Scene):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("fail", failure_ttl=0)
        (event,) = scene.events.expect((job.id, "failed"))
    assert event["data"]["message"] == "Job failed; its record is gone"


def test_a_canceled_job_that_is_enqueued_again_was_canceled_once(scene: Scene):
    """RQ leaves the entry where it is; whoever comes back finds a running job in the canceled registry."""
    with scene.watching():
        job = scene.enqueue("wait_for", str(scene.directory / "flag"), job_id="again")
        job.cancel()
        scene.events.expect(("again", "canceled"))
    scene.worker()
    scene.enqueue("wait_for", str(scene.directory / "flag"), job_id="again")
    eventually(lambda: job.get_status() == "started", 20)
    others: list[tuple[str, str]] = []
    for number in range(2):
        with scene.watching():
            others += [(job_id, "failed") for job_id in scene.burst(1, prefix=f"other{number}")]
            scene.events.expect(("again", "canceled"), *others)


def test_a_cancellation_found_late_is_not_about_the_execution_that_runs_by_then(scene: Scene):
    flag = scene.directory / "flag"
    job = scene.enqueue("wait_for", str(flag), job_id="again")
    job.cancel()
    second = scene.redis.zscore("rq:canceled:digits", job.id)
    assert second is not None
    eventually(lambda: int(scene.redis.time()[0]) > second, message="the clock has gone on")
    scene.worker()
    scene.enqueue("wait_for", str(flag), job_id="again")
    eventually(lambda: job.get_status() == "started", 20)
    with scene.watching():
        (event,) = scene.events.expect(("again", "canceled"))
        assert event["data"]["running"] is False
        flag.touch()
        eventually(lambda: job.get_status() == "finished", 20)
        scene.burst(1)
        scene.events.expect(("again", "canceled"), ("burst-00000", "failed"))


def test_a_given_up_job_that_a_paused_worker_finishes_is_reported(scene: Scene):
    worker = scene.worker(lease=2)
    with scene.watching(stuck_job_timeout_s=4.0, sweep_s=1.0):
        job, flag = scene.hang()
        scene.signal_group(worker, signal.SIGSTOP)
        scene.events.expect((job.id, "lost"))
        scene.queue.started_job_registry.cleanup()
        eventually(lambda: scene.redis.zcard("rq:failed:digits") == 1)
        scene.burst(1)  # once this is told, the clean-up has been seen too
        scene.events.expect((job.id, "lost"), ("burst-00000", "failed"))
        flag.touch()
        scene.signal_group(worker, signal.SIGCONT)
        lost, _, finished = scene.events.expect((job.id, "lost"), ("burst-00000", "failed"), (job.id, "finished"))
    assert finished["data"]["follows"] == lost["id"]


def test_one_id_in_two_queues_is_two_executions(scene: Scene, tmp_path):
    other = Scene(scene.server, tmp_path, queue="letters")
    scene.worker()
    other.worker()
    flags = [tmp_path / "one", tmp_path / "two"]
    with scene.watching(queues=("digits", "letters"), stuck_job_timeout_s=1.0, sweep_s=1.0) as watching:
        for place, flag in ((scene, flags[0]), (other, flags[1])):
            place.enqueue("wait_for", str(flag), job_id="same", job_timeout=-1)
            key = f"rq:wip:{place.name}"
            eventually(lambda key=key: scene.redis.zcard(key) == 1, 20)  # type: ignore[misc]  # a name of this round
        scene.events.expect(("same", "stuck"), ("same", "stuck"))
        scene.sweeps(2)
        flags[0].touch()
        scene.events.expect(("same", "stuck"), ("same", "stuck"), ("same", "finished"))
        scene.sweeps(2)
        flags[1].touch()
        scene.events.expect(*[("same", kind) for kind in ("stuck", "stuck", "finished", "finished")])
        assert watching.error is None
    queues = [(event["data"]["queue"], event["data"]["kind"]) for event in scene.events.all]
    assert sorted(queues[:2]) == [("digits", "stuck"), ("letters", "stuck")]
    assert queues[2:] == [("digits", "finished"), ("letters", "finished")]
    other.close()


@pytest.mark.parametrize("dies", ["worker", "horse", "both"])
def test_each_job_is_reported_once_whichever_process_is_killed(scene: Scene, dies):
    worker = scene.worker(lease=2)
    with scene.watching(stuck_job_timeout_s=4.0):
        job, flag = scene.hang()
        if dies == "both":
            scene.kill_group(worker)
        elif dies == "worker":
            worker.kill()  # the horse goes on, and nobody vouches for it
            worker.wait()
        else:
            (horse,) = scene.horses(worker)
            os.kill(horse, signal.SIGKILL)
        kind = "killed" if dies == "horse" else "lost"
        scene.events.expect((job.id, kind))
        if dies == "worker":
            flag.touch()
            scene.events.expect((job.id, "lost"), (job.id, "finished"))


def test_a_job_requeued_elsewhere_is_not_requeued_again(scene: Scene):
    worker = scene.worker()
    job = scene.enqueue("fail")
    eventually(lambda: job.get_status(refresh=True) == JobStatus.FAILED, timeout=20)
    worker.kill()
    worker.wait()
    # Redis would give the job to a connection that waits for one, as long as it has not noticed that nobody is there.
    eventually(lambda: scene.redis.info("clients")["blocked_clients"] == 0, 30)
    assert requeue_failed(scene.url, scene.queue.name, [job.id]) == [job.id]
    assert requeue_failed(scene.url, scene.queue.name, [job.id]) == []
    assert scene.queue.job_ids == [job.id]
