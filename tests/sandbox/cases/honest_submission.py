# expect: ok | kind: code | observe: an honest one passes every test | maxscore: 1
def solve(x):
    print("working on", x)
    return x * 2
