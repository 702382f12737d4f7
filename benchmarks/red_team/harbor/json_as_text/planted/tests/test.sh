#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/summary.json)" = '{"count": 5, "first": "Ada"}' ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
