"""`report.html`: one page on what a run came to, made of its files alone, that opens anywhere and loads nothing."""
