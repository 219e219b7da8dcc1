"""Environments of OpenEnv servers, by address. OpenEnv's own package is not needed."""
