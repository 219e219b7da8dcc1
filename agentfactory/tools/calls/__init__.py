"""Limits of calls, and their results: cut, filtered, retried, and reported to the person who trains."""
