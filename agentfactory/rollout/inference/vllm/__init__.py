"""vLLM as an inference server: its command line, its launcher, and our plugin."""
