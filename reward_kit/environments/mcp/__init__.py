"""Any server of the Model Context Protocol as a world: its tools are the agent's tools, one session per episode."""
