"""Environments of verifiers, played by verifiers itself in a Python of its own, with the policy as its model."""
