"""The server behind `reward-kit serve`. It provides reward functions over HTTP."""
