"""
Rankscope's exporter: what every pipeline rank of a vLLM engine believes about every request.

Architecture
------------
Two halves that meet in a file and nowhere else:

* *In the vLLM worker*: `plugin` patches one class method when vLLM loads its plugins; after that worker's device is
  up, `hooks` wraps five methods of the model runner instance, `recorder` turns what they see into one fixed-size
  record per step, and `flight` writes it into a memory-mapped file. `control` reads one machine word per step from
  the same file, and `mitigations` acts on it.
* *In the exporter process*: `serve` reads the flight files of the node and answers HTTP, `collectors` renders
  Prometheus metrics from them, `cli` starts it.

`contract` holds the words that both halves and the dashboard server share.
"""

__version__ = "0.1.0"
