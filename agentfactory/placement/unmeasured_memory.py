"""Memory values that no GPU has confirmed yet.

The rest of the memory table is counted on the network itself, or read from a library's source. `make test-gpu` compares
the table with peaks on a real device.
"""

CUDA_CONTEXT = 512 * 2**20
"""Bytes of CUDA, torch's loaded kernels and cuBLAS's workspaces in one process. Differs between GPUs and versions."""
ASKING_CONTEXT = 400 * 2**20
"""Bytes of the CUDA context of a process that asks for free memory and computes nothing."""
NCCL_BUFFERS = 384 * 2**20
"""Bytes in each process when there are several GPUs."""
CUDA_GRAPHS = 512 * 2**20
"""Bytes of captured decode steps."""
SAMPLER_COPIES = 5
"""vLLM: number of float32 values that exist at a time for each logit of all sequences."""
MARGIN = 0.05
"""Share of a device that is left free: allocators keep memory in pieces, some of which are too small to reuse."""

IMAGE_SHARE = 0.5
"""Share of image tokens in a micro-batch, for a model that accepts images."""
IMAGE_PIXELS = 12_845_056
"""Area in pixels of the largest image of a model if the recipe sets none: that of the published Qwen2.5-VL."""
OWN_PIXELS = 2048 * 2048
"""Area of the largest image of a model whose processor may enlarge images: that of the published SmolVLM, the largest
of those families."""
