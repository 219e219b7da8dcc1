"""ALFWorld (Shridhar et al., 2021, arXiv:2010.03768) on its own engine, TextWorld, in processes of their own."""
