"""Reward functions over HTTP; the server of `reward-kit serve`."""
