"""Prebuilt tools that belong to no world, and the registry of all prebuilt names."""
