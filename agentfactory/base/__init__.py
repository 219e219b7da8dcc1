"""The foundation of all packages: errors, messages, typed configuration, user code, processes, HTTP and files."""
