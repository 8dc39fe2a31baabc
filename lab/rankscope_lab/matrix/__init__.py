"""
The version matrix: what every hook and the trim fix say of each vLLM release, read from its source text.

`releases` says which and fetches them, `rows` examines them, `document` shows them. Nothing of a release is imported or run.
"""
