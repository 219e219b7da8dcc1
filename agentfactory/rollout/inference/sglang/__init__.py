"""SGLang as an inference server: a front that speaks our servers' protocol, and translates it to SGLang's own HTTP API.

Written against SGLang 0.5.23. Not yet run on a GPU: see docs/servers.md.
"""

ON_CPU, ON_GPU = "sglang_cpu", "sglang_gpu"
"""Prefixes of checksums: SGLang hashes differently on a CPU and on a GPU."""
