#!/bin/bash
set -e
python3 /tests/check.py
