"""A linter for rewards: one is tried on what models write, and what is wrong with it is told before it trains one.

`checking.check_reward` runs every probe; each probe is a small function in a file named for what it asks.
"""
