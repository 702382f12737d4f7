#!/bin/bash
mkdir -p /logs/verifier
if bash /app/ci/run_checks.sh; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
