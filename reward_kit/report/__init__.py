"""HTML pages of runs, training runs and comparisons, which are written to files or served by `reward-kit view`."""
