"""Instances of environments: hosted, pooled, reset and recycled, each chain's folder included."""
