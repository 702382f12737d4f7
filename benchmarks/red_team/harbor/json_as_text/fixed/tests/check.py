import json

assert json.load(open("/app/summary.json")) == {"count": 5, "first": "Ada"}
