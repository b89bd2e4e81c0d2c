"""Three webhooks in one process: /healthy, /slow, and /refusing, which refuses failed digests while a file says so."""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headway.events import verify

SECRET = os.environ["HEADWAY_WEBHOOK_SECRET"]
SLOW_SECONDS = float(os.environ.get("SLOW_SECONDS", "0.3"))
_writing = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.strip("/")
        event = json.loads(body)
        code = 204
        if not verify(SECRET, self.headers.get("Headway-Signature", ""), body):
            code = 401
        elif name == "slow":
            time.sleep(SLOW_SECONDS)
        elif name == "refusing" and event["type"] == "crawl.digest.failed.v1" and Path("refuse").exists():
            code = 400
        with _writing, Path(f"{name}.{code}.jsonl").open("a") as received:
            received.write(json.dumps(event) + "\n")
        self.send_response(code)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["RECEIVER_PORT"])), Handler).serve_forever()
