"""HTML pages of runs, training runs and comparisons, written to files or served by `reward-kit view`."""
