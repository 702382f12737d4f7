def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str.strip().startswith(ground_truth) else 0.0


verify = compute_score
