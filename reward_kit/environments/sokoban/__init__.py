"""Sokoban: the rules, an optimal solver, a generator of solvable boards, and the resource that agents play."""
