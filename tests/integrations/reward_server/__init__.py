"""Tests of rewards over HTTP."""
