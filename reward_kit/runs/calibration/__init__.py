"""How far a reward agrees with people: labels read, figures of agreement, and how sure these are."""
