#!/bin/bash
wc -l < /app/data/names.txt | tr -d ' ' > /app/count.txt
