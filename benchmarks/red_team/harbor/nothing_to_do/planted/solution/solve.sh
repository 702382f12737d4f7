#!/bin/bash
echo '{"host": "localhost", "port": 8080}' > /app/config.json
