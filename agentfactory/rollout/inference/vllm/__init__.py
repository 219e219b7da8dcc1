"""vLLM as an inference server: its command line, its launcher, and our plugin."""

TABLE_ADAPTERS = "--table-adapters"
"""Flag of `vllm_server`: accept adapters of embedding and head, which vLLM itself accepts for some models only."""
TABLE_ADAPTERS_VARIABLE = "AGENTFACTORY_TABLE_ADAPTERS"
"""Environment variable by which `vllm_server` passes the flag on to vLLM's processes."""
