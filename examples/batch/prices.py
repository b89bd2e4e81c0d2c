"""Ask a shop's API for the price of a product."""

from __future__ import annotations

import asyncio
import functools
import os

import httpx2

SHOP_URL = os.environ.get("SHOP_URL", "http://127.0.0.1:8099")


@functools.cache
def client() -> httpx2.AsyncClient:
    """Return the HTTP client of this worker process. It is opened by the first item, not at import."""
    return httpx2.AsyncClient(base_url=SHOP_URL, timeout=2)


async def fetch_price(product: dict[str, str]) -> dict[str, object]:
    """Return the price of a row of products.csv. Any exception is a failed attempt, which Headway retries."""
    response = await client().get(f"/prices/{product['sku']}")
    while response.status_code == 429:  # not a failure: the shop says when to come back
        await asyncio.sleep(float(response.headers["Retry-After"]))
        response = await client().get(f"/prices/{product['sku']}")
    response.raise_for_status()
    price = response.json()["price"]
    return {"price": float(price), "currency": "EUR"}
