"""Gunicorn's settings: three web workers with threads, and beside them one supervisor of task workers.

`kill -HUP` of Gunicorn's master loads new code into the web workers and the task workers. That needs preload_app = False,
Gunicorn's default: with preload_app the web workers keep the code that the master has loaded.
"""

from typing import Any

from headway.queue.gunicorn import hooks

workers = 3
worker_class = "gthread"
threads = 4
graceful_timeout = 30
when_ready, on_exit, on_reload = hooks("shop:create_app", workers=2, max_workers=4, drain=20.0)


def post_fork(server: Any, _worker: Any) -> None:
    """Give the web worker a connection pool of its own when `--preload` has opened one in the master."""
    if server.cfg.preload_app:
        from shop import engine

        engine.dispose(close=False)
