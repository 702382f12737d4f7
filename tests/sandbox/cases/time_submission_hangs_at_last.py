# expect: timeout | kind: code | observe: the tests it answered count, the one it hangs in does not | maxscore: 0.75
def solve(x):
    while x < 0:
        pass
    return x * 2
