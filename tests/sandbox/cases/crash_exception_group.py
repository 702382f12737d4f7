# expect: error|crashed | kind: reward | observe: an exception that is no Exception, with a deep cause
def evaluate(messages, ground_truth=None, **rest):
    error = ValueError("first")
    for _ in range(5_000):
        outer = BaseExceptionGroup("group", [error])
        outer.__cause__ = error
        error = outer
    raise error
