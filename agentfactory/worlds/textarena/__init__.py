"""Games of the package textarena (Guertler et al., 2025, arXiv:2504.11442) that need no network."""
