"""User code: loading by path, the import path, types and schemas."""
