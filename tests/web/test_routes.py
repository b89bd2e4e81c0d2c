"""Every route of the API, taken from its OpenAPI document, as everybody: a new route is tried without being named here."""

from __future__ import annotations

from typing import Any

import pytest

from headway.views.schemas import documents, json_schema
from headway.views.shape import SCHEMAS
from headway.web.site import RIGHTS
from tests.views.schema_check import problems
from tests.web.conftest import Web

#: What stands in the paths of the document: things that exist, none of them ben's.
EXISTING = {
    "/api/v1/jobs/": {"id": "ads", "item": "44"},
    "/api/v1/tasks/": {"id": "t-anna"},
    "/api/v1/projects/": {"id": "crawl"},
    "/api/v1/states/": {"job": "nightly"},
    "/api/v1/queues/": {"name": "low"},
    "/api/v1/workers/": {"name": "nobody"},
    "/api/v1/alerts/": {"no": "999"},
    "/api/v1/alert-rules/": {"rule": "backlog"},
    "/api/v1/rq-causes/": {"id": "0123456789ab"},
}
#: A worker that answers would have to be there, an open alert, a deployment of RQ; that they are not is an answer too.
ABSENT = ("/api/v1/workers/", "/api/v1/alerts/", "/api/v1/rq-causes/")


def operations(web: Web) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of everything in the document, with its parameters filled in."""
    document = web.ask("/api/v1/openapi.json", token="admin").json
    found = []
    for path, methods in document["paths"].items():
        filled = path
        for begin, values in EXISTING.items():
            if path.startswith(begin):
                for name, value in values.items():
                    filled = filled.replace("{" + name + "}", value)
        assert "{" not in filled, f"{path}: say in EXISTING what to ask for"
        found += [(method.upper(), filled, operation) for method, operation in methods.items()]
    return found


def has_id(web: Web) -> set[str]:
    paths = web.ask("/api/v1/openapi.json", token="admin").json["paths"]
    return {
        operation["operationId"] for path, methods in paths.items() if "{" in path for operation in methods.values()
    }


@pytest.mark.req("S2-27")
def test_no_route_answers_somebody_who_is_not_known(closed: Web):
    found = operations(closed)
    assert len(found) > 25
    for method, path, _ in [*found, ("GET", "/metrics", {}), ("GET", "/api/v1/openapi.json", {})]:
        answer = closed.ask(path, method=method)
        assert (answer.status, answer.error) == (401, "Unauthenticated"), (method, path)
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_every_role_may_do_exactly_what_its_rights_say(fresh: Web):
    for role, rights in RIGHTS.items():
        with_id = has_id(fresh)
        for method, path, operation in operations(fresh):
            right = operation["x-headway-right"]
            assert right in RIGHTS["admin"], f"{path} has no right that an admin has"
            if right == "forget" and role == "admin":
                continue  # the others need the job; it is tried below
            answer = fresh.ask(path, method=method, token=role)
            if right in rights:
                assert answer.status != 401, (role, method, path, answer.text)
                assert answer.status != 403, (role, method, path, answer.text)
                assert answer.status < 500, (role, method, path, answer.text)
            elif role == "user" and operation["operationId"] in with_id:
                assert answer.status == 404, (role, method, path, answer.text)
            else:
                assert (answer.status, answer.error) == (403, "Forbidden"), (role, method, path, answer.text)
    assert fresh.post("/api/v1/jobs/ads/forget", token="admin").json["touched"] == 60


@pytest.mark.req("S2-27")
def test_another_person_finds_nothing_under_any_id(fresh: Web):
    """Ben, of the same application: what is not his is as missing as what never was."""
    with_id = has_id(fresh)
    tried = 0
    for method, path, operation in operations(fresh):
        if operation["operationId"] not in with_id:
            continue
        answer = fresh.ask(path, method=method, token="other")
        assert answer.status == 404, (method, path, answer.text)
        tried += 1
        missing = fresh.ask(path.replace("t-anna", "t-nobody"), method=method, token="other")
        assert missing.text.replace("t-nobody", "t-anna") == answer.text
    assert tried > 15
    listed = fresh.ask("/api/v1/tasks", token="other").json
    assert [task["id"] for task in listed["tasks"]] == ["t-ben"]
    assert fresh.ask("/api/v1/tasks?user=anna", token="other").status == 403
    assert fresh.ask("/api/v1/tasks?before=t-anna", token="other").status == 404
    assert fresh.ask("/api/v1/tasks/t-anna", token="user").json["task"]["status"] == "QUEUED"


def test_a_person_may_cancel_their_own_task_and_no_other(fresh: Web):
    assert fresh.post("/api/v1/tasks/t-anna/cancel", token="other").status == 404
    assert fresh.ask("/api/v1/tasks/t-anna", token="admin").json["task"]["status"] == "QUEUED"
    assert fresh.post("/api/v1/tasks/t-anna/cancel", token="user").json["text"] == "Task t-anna is CANCELLED."


@pytest.mark.req("S2-54")
def test_every_answer_has_its_published_shape(fresh: Web):
    """The same documents as --json: same schemas, checked against the views."""
    for method, path, operation in operations(fresh):
        if operation["x-headway-right"] == "forget":
            continue
        answer = fresh.ask(path + ("?q=ads" if path.endswith("/search") else ""), method=method, token="admin")
        assert answer.headers["Content-Type"] == "application/json"
        if answer.status != 200:
            expected = (
                ("Refused", "UsageError") if operation["x-headway-right"] == "run" else ("InvalidInput",)
            )  # no run
            assert path.startswith(ABSENT) or answer.error in expected, (path, answer.text)
            continue
        document = answer.json
        schema = json_schema(documents()[document["schema"]], document["schema"])
        assert problems(document, schema) == []
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert SCHEMAS[reference.rpartition("/")[2]] == document["schema"]


ODD = ["..%2f..", "%00", "a%20b", "%F0%9F%92%A9", "x" * 129, "x" * 5000, "'--", "%ff", "-1", "9" * 40, "a%0d%0ab"]


def test_an_odd_id_or_number_is_a_clear_error_everywhere(closed: Web):
    paths = closed.ask("/api/v1/openapi.json", token="admin").json["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            for odd in ODD if "{" in path else []:
                asked = path.replace("{item}", odd).replace("{id}", odd).replace("{job}", odd).replace("{name}", odd)
                answer = closed.ask(asked, method=method.upper(), token="admin")
                assert answer.status in (400, 404), (asked[:80], answer.status, answer.text[:200])
                assert answer.error
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "query" and "{" not in path and method == "get":
                    for odd in ["%00", "-2", "nan", "9" * 30, "';DROP", "%F0%9F%92%A9"]:
                        answer = closed.ask(f"{path}?{parameter['name']}={odd}", token="admin")
                        assert answer.status in (200, 400, 404), (path, parameter["name"], odd, answer.text[:200])


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"1",
    b"null",
    b'{"other": 1}',
    b'{"reason": 1}',
    b'{"reason": null}',
    b"\xff",
    b'{"a":' * 2000,
]


def test_a_bad_body_is_refused_and_changes_nothing(closed: Web):
    posts = [(path, operation) for method, path, operation in operations(closed) if method == "POST"]
    assert len(posts) >= 8
    before = closed.ask("/api/v1/activity", token="admin").json
    for path, _ in posts:
        for body in BAD_BODIES:
            answer = closed.post(path, body, token="admin")
            assert answer.status == 400, (path, body[:40], answer.text)
            assert answer.error == "UsageError"
        answer = closed.post(path, b'{"reason": "x"}', token="admin", Content_Type="text/plain")
        assert (answer.status, answer.error) == (415, "NotAcceptable")
    assert closed.ask("/api/v1/activity", token="admin").json == before


def test_what_is_larger_than_any_request_is_refused_before_it_is_read(closed: Web):
    answer = closed.post("/api/v1/queues/low/pause", b'{"reason": "' + b"x" * 1_100_000 + b'"}', token="admin")
    assert (answer.status, answer.error) == (413, "TooLarge")


def test_an_unknown_path_and_a_wrong_method_have_the_same_shape_of_error(closed: Web):
    assert closed.ask("/api/v1/nothing", token="viewer").error == "UnknownPath"
    assert closed.ask("/api/v1/jobs", method="DELETE", body={}, token="viewer").error == "WrongMethod"
