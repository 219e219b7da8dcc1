"""Prebuilt environments and tools, each a folder that registers itself by the entry point `agentfactory.worlds`."""
