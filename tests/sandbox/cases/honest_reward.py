# expect: ok | kind: reward | observe: an honest reward scores, with the library at hand | score: 0.75
import collections
import datetime
import json
import random
import re
import statistics
import tempfile


def evaluate(messages, ground_truth=None, **rest):
    with tempfile.TemporaryFile("w+") as file:
        json.dump({"day": str(datetime.date(2024, 2, 29)), "numbers": [0.5, 1.0]}, file)
        file.seek(0)
        numbers = json.load(file)["numbers"]
    assert re.search(r"\d", messages[0]["content"]) and collections.Counter("aa")["a"] == 2 and random.random() < 1
    return {"score": statistics.mean(numbers)}
