"""The parts of the learner: token rows, forward pass, sharding and optimizer. `rl.ppo` combines them."""
