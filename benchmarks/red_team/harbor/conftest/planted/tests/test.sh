#!/bin/bash
mkdir -p /logs/verifier
if cp /tests/test_outputs.py /app/test_outputs.py && cd /app && pytest -q -p no:cacheprovider test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
