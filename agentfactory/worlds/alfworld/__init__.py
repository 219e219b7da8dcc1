"""ALFWorld (Shridhar et al., 2021, arXiv:2010.03768) on its original engine, TextWorld, in subprocesses."""
