def verify(response, label):
    return response.strip().strip("().") == label
