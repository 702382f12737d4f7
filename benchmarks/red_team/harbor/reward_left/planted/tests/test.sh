#!/bin/bash
mkdir -p /logs/verifier
set -e
grep -qx 5 /app/count.txt
echo 1 > /logs/verifier/reward.txt
