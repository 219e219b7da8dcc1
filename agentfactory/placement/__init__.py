"""Planning of the devices of trainer and server, and a check of their memory, before anything starts."""
