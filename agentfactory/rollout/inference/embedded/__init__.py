"""The embedded engine: continuous batching over one KV cache, for a CPU or one GPU, behind vLLM's routes."""
