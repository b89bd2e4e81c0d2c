"""The work: write a short advertisement for a product.

It stands for a call to a service over the network: it takes a moment, and now and then the service is overloaded or
slow. `make_ad` knows nothing of headway. Which calls fail depends on the product alone, so that every run of the
example is the same; where a failed item is tried again, it succeeds.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

#: Where the make-believe service remembers who called before. A real one would not need it.
VISITS = Path(os.environ.get("ADS_VISITS", Path(__file__).parent / ".work" / "visits"))

OPENINGS = ("Meet", "Say hello to", "New this week:", "Back in stock:", "Made to last:")


class ServiceOverloaded(Exception):
    """The service asks us to come back later."""


class ServiceTimeout(Exception):
    """The service did not answer in time."""


def make_ad(product: dict[str, Any]) -> dict[str, str]:
    """An advertisement for ``product``, as the make-believe service writes it."""
    chance = blake2b(product["sku"].encode(), digest_size=2).digest()
    time.sleep(0.03 + chance[0] / 5_000)  # 30 to 80 milliseconds, as a near service takes
    if chance[1] < 12 and _is_first_call(product["sku"]):
        raise ServiceOverloaded(f"too many requests while writing about {product['sku']}")
    if chance[1] > 250 and _is_first_call(product["sku"]):
        raise ServiceTimeout(f"no answer about {product['sku']} within 2 s")
    opening = OPENINGS[chance[0] % len(OPENINGS)]
    text = f"{opening} the {product['color']} {product['name']}. Yours for {product['price'] / 100:.2f} euros."
    return {"sku": product["sku"], "ad": text}


def _is_first_call(sku: str) -> bool:
    VISITS.mkdir(parents=True, exist_ok=True)
    try:
        (VISITS / sku).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
