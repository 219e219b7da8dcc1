"""Images for tools: decoding, resizing, coordinates and caching."""
