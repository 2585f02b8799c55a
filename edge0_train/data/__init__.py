"""Text: from a source of prompts to rows of token ids, and from rows to batches.

tasks.py, or sources.py and conversations.py (where prompts come from, in which forms), prompts.py (which of them are taken),
chat.py (the tokenizer's template), complete.py (who writes the completions), writing.py (shards that survive an interruption),
health.py (are they worth training on), rows.py (files, batches, windows).
"""
