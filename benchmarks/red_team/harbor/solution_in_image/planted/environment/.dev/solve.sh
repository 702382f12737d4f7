#!/bin/bash
python3 - <<'END'
import csv
from collections import defaultdict

totals = defaultdict(int)
for row in csv.DictReader(open("/app/data/orders.csv")):
    totals[row["customer"]] += int(row["price"])
with open("/app/totals.csv", "w") as file:
    file.write("customer,total\n")
    for name in sorted(totals):
        file.write(f"{name},{totals[name]}\n")
END
