"""Files that others may have written: opened without following links, locked, written whole, removed."""
