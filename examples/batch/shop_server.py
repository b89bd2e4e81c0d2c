"""A shop's API that fails as real ones do. Every request it reads is one line of requests.jsonl.

Of ten products one is answered 429 (Retry-After: 1) and one 500 by the first request. One of 25 gets no answer the first
time. One of 40 has a price with a decimal comma. `POST /events` takes the events of Headway into events.jsonl.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

requests = Counter[str]()
writing = threading.Lock()


def write(file: str, line: object) -> None:
    with writing, Path(file).open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


class Shop(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        sku = self.path.removeprefix("/prices/")
        with writing:
            requests[sku] += 1
        number, first = int(sku.removeprefix("P-")), requests[sku] == 1
        time.sleep(0.02)
        if number % 10 == 1 and first:
            self.answer(sku, 429, {"Retry-After": "1"})
        elif number % 10 == 2 and first:
            self.answer(sku, 500)
        elif number % 25 == 3 and first:
            write("requests.jsonl", {"sku": sku, "status": None})
            time.sleep(3)  # the caller has given up
            self.close_connection = True
        else:
            price = f"{4.90 + number / 100:.2f}"
            self.answer(sku, 200, price=price.replace(".", ",") if number % 40 == 5 else price)

    def do_POST(self) -> None:
        event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        write("events.jsonl", event)
        self.respond(204)

    def answer(self, sku: str, status: int, headers: dict[str, str] | None = None, **body: str) -> None:
        write("requests.jsonl", {"sku": sku, "status": status})
        self.respond(status, headers, json.dumps(body).encode())

    def respond(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Leave standard error empty: requests.jsonl has it all."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore callers that left before their answer."""


if __name__ == "__main__":
    address = urlsplit(os.environ.get("SHOP_URL", "http://127.0.0.1:8099"))
    server = Server((address.hostname or "127.0.0.1", address.port or 8099), Shop)
    print(f"The shop listens on {address.geturl()}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
