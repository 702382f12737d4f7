"""Sampling of actions from a local language model: the engine, the action formats, and constraints on answers."""
