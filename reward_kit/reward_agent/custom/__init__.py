"""Score functions in the form that verl users write, as rewards: `compute_score`, and a class that has one."""
