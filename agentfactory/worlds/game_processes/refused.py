"""`Refused`: the error of a call with invalid arguments, in both processes."""


class Refused(Exception):
    """A call that a game refuses, because its arguments are invalid; the game is unchanged."""
