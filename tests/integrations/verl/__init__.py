"""Tests with the real verl in its own Python, run by `test_verl_suite.py` (`make integrations`)."""
