# expect: ok | kind: reward | observe: what is done to the arguments stays with the copy | score: 0.5
def evaluate(messages, ground_truth=None, **rest):
    messages[0]["content"] = "forged"
    messages.clear()
    rest["more"] = 1
    return {"score": 0.5}
