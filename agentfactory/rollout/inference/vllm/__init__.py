"""vLLM as an inference server: its command line, its start, and our plugin in it."""
