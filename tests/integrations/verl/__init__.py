"""Tests against the real verl, in its own Python: `test_verl_itself.py` starts them, and `make integrations` that."""
