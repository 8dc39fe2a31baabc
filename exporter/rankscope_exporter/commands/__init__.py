"""
The commands that look into flight files: `dump`, `copy` and `tail`.
"""
