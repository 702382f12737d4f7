#!/bin/bash
mkdir -p /logs/verifier
if python3 /tests/check.py | grep -q 'finished 71f3'; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
