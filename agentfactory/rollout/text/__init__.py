"""Text and tokens: tokenizers, chat templates, tool-call formats, and the rendering of conversations as token ids."""
