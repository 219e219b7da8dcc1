"""Screens: a browser that the model controls from screenshots."""
