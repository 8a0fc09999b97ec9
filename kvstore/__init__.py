"""kvtier: a persistent tier for the KV cache of LLM inference engines."""
