"""
Simulated engines: ranks without vLLM that go wrong the way vLLM does.

Model and scheduler are simulated; what is watched is not. Each rank is a process whose runner carries the real hooks,
recorder, flight writer, control word and trim fix, so flight files, control and the exchange of code are the product's own.
"""
