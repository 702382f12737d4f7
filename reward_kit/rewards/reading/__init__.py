"""What rewards read of a conversation: what the agent wrote, fenced blocks, final answers, texts made alike."""
