"""ScienceWorld (Wang et al., 2022, arXiv:2203.07540) on its real engine, which runs in Java processes."""
