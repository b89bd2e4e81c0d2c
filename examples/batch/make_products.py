"""Write products.csv: 2,000 products, or as many as PRODUCTS says."""

from __future__ import annotations

import csv
import os
from pathlib import Path

NAMES = ("desk lamp", 'monitor, 27"', "Teekanne für zwei", "rain jacket\nwith hood", "wool scarf")

with Path("products.csv").open("w", encoding="utf-8", newline="") as file:
    table = csv.writer(file)
    table.writerow(["sku", "name"])
    for number in range(int(os.environ.get("PRODUCTS", "2000"))):
        table.writerow([f"P-{number:05d}", NAMES[number % len(NAMES)]])
