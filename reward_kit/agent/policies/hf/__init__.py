"""Sampling of actions from a local language model: the engine, action formats, and constraints on answers."""
