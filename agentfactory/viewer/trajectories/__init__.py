"""The page of one trajectory: messages, tokens, images."""
