"""The soft penalty for long chains (`train.overlong`)."""


def overlong_penalty(length: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """Returns the amount, at most 0, to add to the reward of a chain of `length` tokens (Yu et al., 2025, DAPO,
    arXiv:2503.14476, equation 13, where the penalty is 1): 0 up to limit - buffer, then falling linearly to -penalty at
    limit."""
    over = length - (limit - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0)
