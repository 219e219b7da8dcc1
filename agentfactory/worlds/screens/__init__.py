"""Screens: a browser in which a model acts on what it sees."""
