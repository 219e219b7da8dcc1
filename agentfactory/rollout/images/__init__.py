"""Images in chains: stored once per run, resized as the model needs them, and expanded to tokens."""
