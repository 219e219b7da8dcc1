"""Startup probes of a chat template: its behaviour is derived from renders of a set of conversations, never from the
name of a model or family.

A chain appends the template's text after a sampled turn, and never renders that turn again. This matches the template's
own format only if the template leaves earlier turns unchanged, which the probes check.
"""
