#!/bin/bash
mkdir -p /logs/verifier
if cd /app && python3 -m pytest -q -p no:cacheprovider --noconftest /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
