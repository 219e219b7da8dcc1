"""SGLang as an inference server: a front that speaks our servers' protocol, and translates it to SGLang's own HTTP API.

Written against SGLang 0.5.23. Not yet run on a GPU: see docs/servers.md."""
