"""HTTP servers of ours: addresses, keys, and bounds on what clients can hold."""
