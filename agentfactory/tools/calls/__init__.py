"""Limits of calls, truncation and filtering of their results, and notices to the user."""
