"""User code: loaded by path, its import path, its types and schemas."""
