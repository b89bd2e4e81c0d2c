"""What the OpenAPI document promises, asked in every way that it allows and in some that it does not: schemathesis writes the
requests, for `make schemas`: it takes a minute for what `test_edges.py` of the suite looks at in seconds. The seed is fixed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation, BaseSchema

from headway.web.application import app
from tests.web.conftest import Servers, Web, seed_queue, seed_states

#: Ids that are there: half of the requests are about them.
KNOWN: dict[str, list[Any]] = {
    "id": ["ads", "t-failed", "t-anna", "crawl"],
    "job": ["nightly"],
    "item": ["44", "sku-44"],
    "name": ["low", "w-1"],
    "no": [1],
    "rule": ["backlog"],
}
Operation = APIOperation[Any, Any, Any, Any]
BOTH = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def document() -> dict[str, object]:
    found = app(database="sqlite:///:memory:")._inner.openapi()
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def operations() -> Iterator[Operation]:
    schema: BaseSchema = schemathesis.openapi.from_dict(document())
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        yield found.ok()


def attack(web: Web, operation: Operation, examples: int) -> None:
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in BOTH))

    @seed(7)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, known=st.booleans(), data=st.data())
    def ask(case: schemathesis.Case[Any], known: bool, data: st.DataObject) -> None:
        if known:
            for name in set(case.path_parameters or {}) & set(KNOWN):
                case.path_parameters[name] = data.draw(st.sampled_from(KNOWN[name]))
        response = case.call(base_url=web.address, timeout=60)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code == 200:
            assert response.json()["schema"].startswith("headway.")
        elif response.status_code != 304 and response.content:
            assert response.json()["schema"] == "headway.error/1"

    ask()


def attacked(web: Web, examples: int) -> None:
    asked = 0
    for operation in operations():
        attack(web, operation, examples)
        asked += 1
    assert asked > 30
    assert web.ask("/healthz").text == "ok\n"


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_requests_of_every_kind_are_no_server_error(
    serve: Servers, database: str, kind: str, request: pytest.FixtureRequest
):
    url = database
    if kind == "postgresql":
        url = request.getfixturevalue("postgres_with_tables")
        seed_queue(url)
        seed_states(url)
    attacked(serve("--no-auth", "--database", url), int(os.environ.get("HEADWAY_EXAMPLES", "50")))
