"""Doors to what others wrote: trainers, environments, engines, servers, test runners. Each imports its peer itself."""
