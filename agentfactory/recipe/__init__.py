"""Recipes: their schema, how files and overrides are composed, and the checks."""
