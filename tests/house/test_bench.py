"""The summary of the benchmarks: a missed goal is seen, a missing figure is a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import bench


@pytest.mark.parametrize(
    ("result", "met"),
    [
        ({"figures": [{"name": "p99", "value": 3, "unit": "ms", "target": "<= 10", "ok": True}]}, [True]),
        ({"figures": [{"name": "p99", "value": 30, "unit": "ms", "target": "<= 10", "ok": False}]}, [False]),
        ({"figures": [{"name": "rate", "value": 30, "unit": "1/s"}]}, []),
        ({"redis": {"ratio_p50": 1.4, "bare_p50_ms": 9.0, "goal": "ratio_p50 <= 1.5"}}, [True]),
        ({"redis": {"ratio_p50": 1.6, "bare_p50_ms": 0.1, "goal": "ratio_p50 <= 1.5"}}, [False]),
        ({"sqlite": {"busy": {"p50_ms": 3, "p99_ms": 60}, "goal": "p99 <= 50 ms"}}, [False]),
        ({"sqlite": {"busy": {"p50_ms": 90, "p99_ms": 40}, "goal": "p99 <= 50 ms"}}, [True]),
        ({"reads": {"per_second": 99_999, "goal": ">= 100,000"}}, [False]),
        ({"all": {"n": 3, "m": 4, "goal": "every one once", "reached": False}}, [False]),
        ({"all": {"one": 1, "two": 2, "goal": "0: one listener serves all"}}, [None]),
        ({"budget_ms": 120, "milliseconds": {"x": {"min": 130}}, "within_budget": {"x": False}}, [False]),
    ],
)
def test_a_goal_is_met_missed_or_for_people_to_judge(result: dict[str, Any], met: list[bool | None]):
    assert [goal.met for goal in bench.goals("b", result)] == met


def test_a_missed_goal_is_printed_and_a_missing_figure_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.json").write_text(json.dumps({"part": {"n": 3.0, "goal": "< 2"}}))
    assert bench.summarise(tmp_path, [], {"a"}, wanted={"a"}) == 0
    told = capsys.readouterr().out
    assert "MISSED  a           part: < 2: n 3" in told
    assert "0 goals met, 1 MISSED" in told
    assert bench.summarise(tmp_path, [], {"a"}, wanted={"a", "b"}) == 1
    assert "NO FIGURE: docs/internals/requirements.md names bench/b.py" in capsys.readouterr().out
    assert bench.summarise(tmp_path, ["a crashed"], {"a"}, wanted=set()) == 1


def test_every_benchmark_the_requirements_name_exists():
    assert bench.promised()
    assert all((bench.ROOT / "bench" / f"{name}.py").exists() for name in bench.promised())
