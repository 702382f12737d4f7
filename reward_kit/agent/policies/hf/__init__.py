"""A language model of your own that acts: the engine that samples from it, and what its answers may hold."""
