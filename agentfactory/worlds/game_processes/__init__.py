"""Processes for games of other packages: one per chain, so that a game that hangs or crashes ends no other chain, and a
package's global random generator serves one game."""
