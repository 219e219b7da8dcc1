"""The gateway: an HTTP endpoint through which agents with their own loop sample the turns of their chains."""
