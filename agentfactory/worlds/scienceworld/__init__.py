"""ScienceWorld (Wang et al., 2022, arXiv:2203.07540) on its original engine, in Java subprocesses."""
