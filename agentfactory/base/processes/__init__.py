"""Child processes, their memory, and threads."""
