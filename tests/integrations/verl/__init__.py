"""Tests against the real verl, in its own Python: `test_verl_suite.py` starts them, and `make integrations` that."""
