"""HTML pages of runs, training runs and comparisons, as files and served by `reward-kit view`."""
