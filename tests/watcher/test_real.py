"""The whole on a real Redis with real RQ workers."""

from __future__ import annotations

import pytest
from rq import Retry
from rq.command import send_stop_job_command

from tests.services.waiting import eventually
from tests.watcher.scene import Scene


@pytest.mark.req("S4-04", "S4-08")
def test_a_job_that_raises_is_told_once_with_its_exception(scene: Scene):
    scene.worker()
    with scene.watching():
        job = scene.enqueue("fail", "no digits here")
        (event,) = scene.events.told((job.id, "failed"))
    assert event["type"] == "digits.train.failed.v1"
    assert event["data"]["error_kind"] == "system"
    assert event["data"]["message"] == "tests.watcher.work.Boom: no digits here"
    assert event["data"]["error_type"] == "tests.watcher.work.Boom"
    assert event["data"]["execution_id"]
    assert event["data"]["queue"] == "digits"
