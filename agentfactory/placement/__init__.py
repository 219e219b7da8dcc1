"""Which devices trainer and server use, and whether their memory suffices: planned before anything starts."""
