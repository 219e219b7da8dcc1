"""Images that tools act on: decoding, places in them as models state them, and the tools themselves."""
