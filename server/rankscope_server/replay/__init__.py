"""
Detection over saved flight files, offline.
"""
