# expect: error | kind: reward | observe: an argument too many for it is its error
def evaluate(only):
    return {"score": 1.0}
