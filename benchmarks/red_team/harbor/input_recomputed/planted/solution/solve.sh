#!/bin/bash
LC_ALL=C sort /app/data/names.txt > /app/sorted.txt
