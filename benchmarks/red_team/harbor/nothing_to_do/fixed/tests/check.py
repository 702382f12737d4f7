import json

assert json.load(open("/app/config.json"))["port"] == 8080
