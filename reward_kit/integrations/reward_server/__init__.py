"""Reward functions over HTTP: what `reward-kit serve` runs."""
