"""An OpenAI-compatible proxy in front of engines, which sends each request where its first token is cheapest.

It holds no KV and moves none. Where it knows nothing (no tokenizer, no directory, no events) it balances load.
"""
