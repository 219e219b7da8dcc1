"""Environments of the package gymnasium (Farama), described in words."""
