"""
The exporter process: reads the flight files of a node and answers HTTP.
"""
