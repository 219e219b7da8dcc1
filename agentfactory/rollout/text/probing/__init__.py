"""Judges a chat template at start-up by its renders of a set of conversations; no model or family is known by name.

A chain appends what the template puts after a sampled turn, and never renders that turn again. This matches the
template's own format only if the template leaves earlier turns unchanged. The probes check that.
"""
