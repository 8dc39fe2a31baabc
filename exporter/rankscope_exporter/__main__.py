"""
`python -m rankscope_exporter`.
"""

import sys

from rankscope_exporter.cli import main

if __name__ == "__main__":
    sys.exit(main())
