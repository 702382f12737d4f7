def verify(output, reference):
    return float(output.strip() == reference.strip())
