"""Judges: rewards from language models. The core does not import it."""
