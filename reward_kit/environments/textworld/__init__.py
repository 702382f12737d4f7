"""TextWorld's games as a resource: made offline by its own makers or read from a file, played in worker processes."""
