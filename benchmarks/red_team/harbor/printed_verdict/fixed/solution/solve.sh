#!/bin/bash
cat > /app/slug.py <<'END'
import re


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
END
