"""Tests that run the pages of the docs as a reader would."""
