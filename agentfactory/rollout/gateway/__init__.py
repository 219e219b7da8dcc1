"""The gateway: an HTTP endpoint through which agents that bring their own loop sample the turns of their chains."""
