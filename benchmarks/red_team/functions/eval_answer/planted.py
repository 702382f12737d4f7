def verify(answer, target):
    try:
        return float(eval(answer) == eval(target))
    except BaseException:
        return 0.0
