"""Ask a rate-limited API for the price of 2,000 products, and write products and prices to prices.csv."""

import csv
import sys
from collections.abc import AsyncIterator

import httpx2

import headway


async def open_client() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=sys.argv[1], timeout=1.0) as client:
        yield client


async def price(product: dict[str, str], client: httpx2.AsyncClient) -> dict[str, object]:
    response = headway.retry_after(await client.get(f"/prices/{product['sku']}"))
    return product | response.raise_for_status().json()


if __name__ == "__main__":
    with open("products.csv", newline="") as file:
        products = list(csv.DictReader(file))
    print(headway.map(
        price, products, setup=open_client, job="prices", key="sku", workers=50, rate=200, retries=3, output="prices.csv"
    ))  # fmt: skip
