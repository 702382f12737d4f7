"""ALFWorld's household domain: problems, a generator of them, the real engine and a fast one of our own."""
