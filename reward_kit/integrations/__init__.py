"""Integrations with trainers, environments, inference engines and test runners.

Each module imports only the library with which it integrates.
"""
