#!/bin/bash
mkdir -p /logs/verifier
if cd / && python3 -I -m pytest -q -p no:cacheprovider --noconftest -c /dev/null --rootdir /tests /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
