"""A website of this example's own making, served on 127.0.0.1: pages that link to each other, and some dead links."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ("anchor", "breeze", "candle", "delta", "ember", "fjord", "garnet", "harbour", "island", "jetty", "kelp")


def pages(count: int) -> dict[str, str]:
    """The same site every time. Every page can be reached from /0; each seventh links to a page that is not there."""
    site = {}
    for number in range(count):
        rng = random.Random(number)
        children = [child for child in (2 * number + 1, 2 * number + 2) if child < count]
        links = [*children, rng.randrange(count)]
        anchors = [f'<a href="/{link}">{link}</a>' for link in links]
        if number % 7 == 3:
            anchors.append(f'<a href="/gone-{number}">more</a>')
        text = " ".join(rng.choices(WORDS, k=rng.randrange(20, 200)))
        site[f"/{number}"] = f"<html><body><p>{text}</p>{' '.join(anchors)}</body></html>"
    return site


@contextmanager
def serve(count: int, port: int = 0) -> Iterator[str]:
    """The address of the site, while the block lasts."""
    site = pages(count)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = site.get(self.path)
            self.send_response(200 if page else 404)
            self.end_headers()
            self.wfile.write((page or "gone").encode())

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    with serve(int(os.environ["SITE_PAGES"]), int(os.environ["SITE_PORT"])):
        threading.Event().wait()
