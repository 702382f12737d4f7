# expect: timeout|error|crashed | kind: reward | observe: standard input is at its end, and the channel gives what no code should wait for
import os
import sys


def evaluate(messages, ground_truth=None, **rest):
    assert sys.stdin.read() == ""
    while True:
        os.read(3, 1)
