"""Text: from a source of prompts to rows of token ids, and from rows to batches.

prompts.py and tasks.py (where prompts come from), chat.py (the tokenizer's template), complete.py (who writes the completions),
writing.py (shards that survive an interruption), health.py (are they worth training on), rows.py (files, batches, windows).
"""
