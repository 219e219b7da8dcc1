"""Startup probes of a chat template: its behaviour is derived from renders of conversations, never from the name of a
model. They check that earlier turns stay unchanged, because a chain never renders a turn again."""
