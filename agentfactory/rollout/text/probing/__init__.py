"""Startup probes of a chat template: its behaviour is derived from renders of a set of conversations, never from the
name of a model or family. They check that the template leaves earlier turns unchanged, because a chain appends the
template's text after a sampled turn, and never renders that turn again."""
