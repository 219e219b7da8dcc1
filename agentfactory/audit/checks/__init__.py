"""The checks of an audit, one subject per file."""
