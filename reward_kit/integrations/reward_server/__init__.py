"""The server of `reward-kit serve`, which provides reward functions over HTTP."""
