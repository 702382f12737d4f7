"""The pages of the docs, run as a reader would run them."""
