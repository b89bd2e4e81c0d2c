"""Gunicorn's settings: two web workers with threads, and beside them one supervisor of task workers."""

from headway.queue.gunicorn import hooks

workers = 2
threads = 4
preload_app = True
graceful_timeout = 30
when_ready, on_exit, on_reload = hooks("shop:headway", workers=2, max_workers=4, drain=20.0)
