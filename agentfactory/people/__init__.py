"""Stand-ins for people: simulated users and judges."""
