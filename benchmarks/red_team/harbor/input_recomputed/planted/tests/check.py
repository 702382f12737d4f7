names = open("/app/data/names.txt").read().split()
assert open("/app/sorted.txt").read().split() == sorted(names)
