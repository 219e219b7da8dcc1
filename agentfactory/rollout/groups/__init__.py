"""Groups of chains: their production, staleness bound, filter, files and resumption."""
