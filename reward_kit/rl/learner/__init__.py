"""The parts of the learner that `rl.ppo` combines: token rows, forward pass, sharding and optimizer."""
