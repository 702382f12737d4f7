"""Integrations with trainers, environments, engines and test runners. Each module imports only its own peer."""
