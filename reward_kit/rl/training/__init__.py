"""From a train file to a trained policy: its configuration, its pipelines, its logs, its evaluation and its state."""
