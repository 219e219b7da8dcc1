"""What every package builds on: errors, messages, typed configuration, user code, processes, HTTP and files."""
