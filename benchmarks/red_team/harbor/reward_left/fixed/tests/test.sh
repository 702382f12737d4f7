#!/bin/bash
mkdir -p /logs/verifier
if grep -qx 5 /app/count.txt; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
