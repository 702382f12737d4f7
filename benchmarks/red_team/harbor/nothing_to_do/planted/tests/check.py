import json

assert "port" in json.load(open("/app/config.json"))
