"""The settings of a run, from the arguments of `headway.map` or the options of ``headway run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.config import Config
from headway.core.retry import LaterLimit, RetryPolicy
from headway.run import function as functions
from headway.run.pool.executor import Executor, capacity, check_executor
from headway.run.pool.runner import Settings
from headway.run.program import Work


def settings_of(
    config: Config,
    function: Work,
    name: str,
    *,
    last_pass: bool,
    fleet: bool = False,
    executor: Executor | None = None,
    encode: Callable[[Any], Any] | None = None,
    setup: object = None,
) -> Settings:
    """Return the settings of a run. `Config` has validated the values."""
    mode = None if config.origin("mode") == "default" else config.text("mode")
    workers, timeout, rate, most = (config[key] for key in ("workers", "timeout", "rate", "max_failures"))
    start = functions.FORK
    if executor is not None:
        check_executor(executor, mode if config.origin("mode") == "command line" else None)
        mode = "executor"
        workers = workers or capacity(executor)
    else:
        mode = functions.choose_mode(function, mode, name, workers or None)
        start = functions.choose_start(function, (encode, setup), config.text("start"))
        if fleet and not workers and mode == "process":
            workers = 1  # per slot: the number of slots depends on the machines
    return Settings(
        workers=int(workers or functions.default_workers(mode)),
        mode=mode,
        policy=policy_of(config),
        timeout=None if timeout is None else float(timeout),
        rate=None if rate is None else float(rate),
        max_failures=None if most is None else int(most),
        last_pass=last_pass,
        start=start,
        later_limit=later_limit_of(config),
        database_option=config.database_option,
    )


def later_limit_of(config: Config) -> LaterLimit:
    """Return how often an item may be postponed."""
    return LaterLimit.parse(config.text("later_limit"))


def policy_of(config: Config) -> RetryPolicy:
    """Return the retry policy for failed items."""
    return RetryPolicy(int(config["retries"] or 0), float(config["retry_delay"] or 0), jitter=0.5, cap=300.0)


def describe(settings: Settings) -> dict[str, Any]:
    """Return the settings as the ledger records them with the run."""
    return {
        "workers": settings.workers,
        "mode": settings.mode,
        "retries": settings.policy.retries,
        "retry_delay": settings.policy.base,
        "timeout": settings.timeout,
        "rate": settings.rate,
        "max_failures": settings.max_failures,
    }
