"""Saved chains, played again in their tools and environments."""
