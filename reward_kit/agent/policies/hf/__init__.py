"""The engine that samples actions from a local language model, and the formats and constraints of its answers."""
