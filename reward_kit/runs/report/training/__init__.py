"""The page of a training run: how it learned, what the figures mean, and episodes along the way."""
