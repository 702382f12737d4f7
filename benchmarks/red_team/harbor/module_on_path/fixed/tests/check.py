with open("/app/count.txt") as file:
    assert file.read().split() == ["5"]
