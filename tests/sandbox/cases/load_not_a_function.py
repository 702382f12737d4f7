# expect: error | kind: reward | observe: what is to be called cannot be
evaluate = 3
