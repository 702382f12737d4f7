"""What rewards of code are made of: hidden tests, the sandbox that programs run in, values and outputs compared."""
