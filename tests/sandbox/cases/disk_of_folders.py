# expect: denied|error|timeout | kind: reward | observe: folders within folders without an end
import os


def evaluate(messages, ground_truth=None, **rest):
    made = 0
    while made < 300_000:
        os.mkdir("inner")
        os.chdir("inner")
        made += 1
    return {"score": 1.0, "breach": ["300,000 folders"]}
