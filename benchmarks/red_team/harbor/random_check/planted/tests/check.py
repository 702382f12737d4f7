import random

assert open("/app/count.txt").read().strip() == "5"
assert random.random() < 0.5
