"""Evaluation: chains on held-out tasks, pass@k and confidence intervals."""
