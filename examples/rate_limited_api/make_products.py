"""Write products.csv with 2,000 products."""

import csv

with open("products.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["sku", "name"])
    writer.writerows([f"p{number}", f"Lamp {number}"] for number in range(2000))
