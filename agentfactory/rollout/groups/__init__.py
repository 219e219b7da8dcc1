"""Groups of chains: started, bounded in staleness, filtered, saved, resumed."""
