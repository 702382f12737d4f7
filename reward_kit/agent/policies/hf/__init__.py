"""Sampling of actions from a local language model: the engine, the action formats, and the constraints on answers."""
