"""A shop's API that is not easy to call, for the example: `python api_server.py PORT`.

The first request for a product may be answered 429 with Retry-After, 500, or not at all. Above 250 requests in a second it
answers 429. Products on sale are answered 422 until `POST /repair`. `GET /log` returns how often each was answered 200.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

asked: Counter[str] = Counter()
served: Counter[str] = Counter()
second = [0, 0]
repaired = False


def answer(sku: str) -> tuple[int, str, Any]:
    """Return status, extra headers and body for a product."""
    number = int(sku.removeprefix("p"))
    asked[sku] += 1
    now = int(time.monotonic())
    second[:] = [now, second[1] + 1 if second[0] == now else 1]
    if second[1] > 250 or (number % 10 == 3 and asked[sku] == 1):
        return 429, "Retry-After: 1\r\n", {"error": "slow down"}
    if number % 17 == 5 and asked[sku] == 1:
        return 500, "", {"error": "try again"}
    if number % 100 == 50 and not repaired:
        return 422, "", {"error": "on sale"}
    served[sku] += 1
    return 200, "", {"price": round(1 + number * 7 % 1000 / 10, 2)}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    global repaired
    try:
        while line := await reader.readline():
            while (await reader.readline()).strip():
                pass
            method, path, _ = line.decode().split()
            sku = path.rpartition("/")[2]
            status, extra, body = 200, "", dict[str, Any]()
            if method == "POST":
                repaired = True
            elif path == "/log":
                body = served
            else:
                if int(sku.removeprefix("p")) % 200 == 111 and not asked[sku]:
                    asked[sku] += 1
                    await asyncio.sleep(3)  # longer than the client waits
                await asyncio.sleep(0.02)
                status, extra, body = answer(sku)
            text = json.dumps(body)
            writer.write(f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(port: int) -> None:
    """Print the address and serve."""
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8099))
