"""
vLLM's V2 model runner (and stock V1 beside it) on a CPU, as it was released, watched by a trace that knows nothing of the exporter.
"""
