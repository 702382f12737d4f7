"""The parts of the learner: rows in, forward pass, loss, optimizer; `rl.ppo` puts them together."""
