"""TRL and Axolotl: our rewards, rollouts, environments and advantages in `GRPOTrainer`."""
