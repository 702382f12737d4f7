"""Integrations with other software: trainers, environments, engines, test runners. Each imports its own peer."""
