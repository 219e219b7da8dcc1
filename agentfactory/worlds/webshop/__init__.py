"""WebShop (Yao et al., 2022, arXiv:2207.01206), reimplemented from its published rules."""
