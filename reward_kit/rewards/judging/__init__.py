"""What the LLM judges share: how a text is fenced in, how a verdict is read, who is asked, and what is kept."""
