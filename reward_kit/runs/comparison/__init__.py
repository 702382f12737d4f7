"""Two runs or more, set against the first of them on the samples that they share."""
