"""The rules, their limits, and how long a value must exceed its limit.

The setting ``alert_NAME`` is the limit of a rule; ``off`` disables the rule. An alert opens when its value has been at or
above the limit for ``alert_open_after`` seconds. It closes when the value has been below a lower limit
(``alert_close_share`` of the first) for ``alert_close_after`` seconds. Between the two limits nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headway.config import Config

Severity = Literal["critical", "warning"]


class Rule(NamedTuple):
    """A condition that opens alerts. Its limit is in `Rules`."""

    name: str
    severity: Severity
    unit: Literal["s", "tasks", "share"]
    help: str

    @property
    def setting(self) -> str:
        """The setting with the limit."""
        return f"alert_{self.name}"


#: Every rule, the most urgent first.
RULES: tuple[Rule, ...] = (
    Rule("store_away", "critical", "s", "the database or Redis could not be reached"),
    Rule(
        "stalled_job",
        "critical",
        "s",
        "a job is held and records nothing, or its process died and no run has continued it",
    ),
    Rule("failure_spike", "critical", "share", "a large share of the runs of a job or a kind of task failed"),
    Rule("worker_lost", "warning", "s", "a worker died and no other replaced it"),
    Rule("no_handler", "warning", "s", "tasks of a kind wait that no online worker runs"),
    Rule("delay", "warning", "s", "the oldest task of a queue waits too long"),
    Rule("backlog", "warning", "tasks", "too many tasks of a queue wait"),
    Rule("new_cause", "warning", "s", "something fails for a new reason"),
    Rule("store_slow", "warning", "s", "a small transaction takes too long"),
    Rule("redis_memory", "warning", "share", "Redis uses too much of its memory"),
    Rule("event_lag", "warning", "s", "a sink is behind with its events"),
)
BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True, slots=True)
class Rules:
    """The current limits and durations. The defaults equal those of the settings (a test compares them)."""

    #: Rule -> limit. None or missing: the rule is disabled.
    limits: Mapping[str, float | None] = field(
        default_factory=lambda: {
            "store_away": 30.0, "stalled_job": 900.0, "failure_spike": 0.2, "worker_lost": 30.0,
            "no_handler": 10.0, "delay": 300.0, "backlog": 10_000.0, "new_cause": 3600.0,
            "store_slow": 1.0, "redis_memory": 0.85, "event_lag": 300.0,
        }
    )  # fmt: skip
    open_after: float = 60.0
    close_after: float = 120.0
    close_share: float = 0.8
    failure_runs: int = 20  # minimum runs in the window for a failure spike
    failure_window: float = 300.0
    kept: float = 30 * 86_400.0  # seconds until closed alerts are deleted
    redis: str | None = None  # address; None: there is no Redis to check
    redis_bytes: int | None = None  # limit if Redis has no maxmemory

    @classmethod
    def of(cls, config: Config) -> Rules:
        """Return the limits from the settings, which `Config` has validated."""
        megabytes, days = config["queue_redis_memory"], config["retention_days"]
        return cls(
            limits={rule.name: _number(config[rule.setting]) for rule in RULES},
            open_after=_known(config["alert_open_after"]),
            close_after=_known(config["alert_close_after"]),
            close_share=_known(config["alert_close_share"]),
            failure_runs=int(_known(config["alert_failure_runs"])),
            failure_window=_known(config["alert_failure_window"]),
            kept=_known(days) * 86_400.0,
            redis=config.text("queue_redis") if config.is_set("queue_redis") else None,
            redis_bytes=None if megabytes is None else int(_known(megabytes)) * 2**20,
        )

    def judge(self, rule: str, value: float) -> bool | None:
        """Return True if the value opens an alert, False if it closes one, None if it changes nothing."""
        limit = self.limits.get(rule)
        if limit is None or value < limit * self.close_share:
            return False
        return True if value >= limit else None


def _known(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _number(value: object) -> float | None:
    return None if value is None else _known(value)


class Reading(NamedTuple):
    """The current value of one rule for one subject."""

    rule: str
    subject: str
    value: float
    text: str
    #: The result of `Rules.judge`.
    above: bool | None
    #: Open the alert without waiting: the value is itself a duration, or a fact.
    at_once: bool = False
