"""What each action was worth: the arrays, baselines and states that the estimators of `rl_helpers` are made of."""
