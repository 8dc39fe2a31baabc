"""
The server at work: judging, keeping, and turning the trim fix on and off.
"""
