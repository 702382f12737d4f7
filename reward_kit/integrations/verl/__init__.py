"""verl: episodes as its batches and back, rewards and advantages for its trainer. Nothing is imported here."""
