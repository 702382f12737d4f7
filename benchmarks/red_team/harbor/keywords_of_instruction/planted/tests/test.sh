#!/bin/bash
mkdir -p /logs/verifier
if grep -q Summary /app/report.md && grep -q Method /app/report.md; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
