# expect: error | kind: reward | observe: a package that is not there is named
import a_package_that_nobody_wrote


def evaluate(messages, ground_truth=None, **rest):
    return {"score": a_package_that_nobody_wrote.score()}
