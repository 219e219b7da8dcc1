"""Our HTTP servers: addresses, keys, retries, and bounds on clients' resources."""
