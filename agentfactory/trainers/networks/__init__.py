"""Networks: policy, critic and reference on transformers models, attention, adapters."""
