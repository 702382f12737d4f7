"""Past one machine: rollouts, rewards and the reward agent as Ray actors, with the interfaces they have in process."""
