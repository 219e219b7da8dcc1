"""Files that others may have written: opening without following links, locking, atomic writing, removal."""
