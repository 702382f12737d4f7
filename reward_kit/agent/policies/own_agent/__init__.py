"""What `OwnAgentPolicy` is made of: the endpoint that an agent talks to, and its requests as an episode's actions."""
