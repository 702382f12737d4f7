"""Logs of other tools: import as runs, and export of runs as logs.

A format converts one document, such as a sample of a log, to a `LogEpisode`. The run keeps a copy of the log, so an
export in the same format restores the fields for which an episode has no place.
"""
