"""Simulated users that recipes name: see `agentfactory.rollout.chains.simulated_user`."""
