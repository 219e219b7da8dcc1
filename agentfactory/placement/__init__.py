"""Plans the devices that trainer and server use, and checks that their memory suffices, before anything starts."""
