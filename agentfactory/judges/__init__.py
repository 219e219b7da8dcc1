"""Judges: rewards from language models, their agreement with people, and rewards computed again from saved chains. The
core does not import it."""
