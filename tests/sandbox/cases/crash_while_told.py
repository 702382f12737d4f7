# expect: error | kind: reward | observe: the exception's own text raises, its class lies about its name
class Lying(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


Lying.__name__ = "x" * 1_000_000


def evaluate(messages, ground_truth=None, **rest):
    raise Lying from Lying()
