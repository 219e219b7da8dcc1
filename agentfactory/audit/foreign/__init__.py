"""Readers of other projects' runs, one project per file.

A reader turns the files that a project saves into a Record, without that project's packages, and says in `Record.lacks`
what these files do not have. It is a function `read(path) -> Record | None`, None if the files at `path` are not its
project's. To add a format, write a file with such a function and name it in formats.FORMATS.
"""
