"""Training a policy from a train file: configuration, pipelines, logs, evaluation and state."""
