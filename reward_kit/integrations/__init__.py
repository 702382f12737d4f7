"""Integrations with trainers, environments, engines and test runners. Each module imports only the library that it
integrates.
"""
