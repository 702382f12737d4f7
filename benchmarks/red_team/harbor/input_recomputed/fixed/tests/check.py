names = "Ada Grace Edsger Barbara Donald".split()
assert open("/app/sorted.txt").read().split() == sorted(names)
