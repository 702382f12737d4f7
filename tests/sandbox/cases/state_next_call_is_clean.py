# expect: ok|denied | kind: reward | observe: files and modules a call leaves are not there for the next one of another function
import os
import pathlib
import sys


def evaluate(messages, ground_truth=None, **rest):
    found = [name for name in os.listdir(".") if "left_over" in name]
    pathlib.Path("left_over_elsewhere").write_text("@MARK@")
    sys.modules["statistics"] = None
    os.environ["LEFT"] = "@MARK@"
    os.umask(0)
    return {"score": 0.0, "breach": [name for name in found if name != "left_over_elsewhere"], "denied": ["nothing was found"]}
