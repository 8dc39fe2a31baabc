"""
`python -m rankscope_server` is `rankscope`.
"""

from rankscope_server.cli import main

main()
