"""Recipes: their schema, the composition of files and overrides, and the checks."""
