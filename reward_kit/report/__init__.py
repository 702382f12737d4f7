"""The pages of runs, trainings and comparisons, as files and as `reward-kit view` serves them."""
