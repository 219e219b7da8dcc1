"""Text and tokens: tokenizers, chat templates, tool-call formats, and rendering a conversation as ids."""
