# expect: invalid-result|error|ok | kind: reward | observe: a result that is none is told as such, never mended
class Name(str):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


TWICE = {Name("score"): 0.0, Name("score"): 0.5}


def evaluate(messages, ground_truth=None, **rest):
    return TWICE
