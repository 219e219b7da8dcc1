"""The client of served worlds for users of verifiers, in a folder of its own so that it can be put on their path."""
