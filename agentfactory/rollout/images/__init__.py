"""Images in chains: storage once per run, resizing for the model, and expansion to image tokens."""
