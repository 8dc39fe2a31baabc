"""
Writes the cases as folders of flight files, to be looked at with `rankscope replay`: make.py DIRECTORY [NAME ...]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from made_case import make_case, write_case

from cases import CASES


def main() -> int:
    """
    Write the cases that are named, or all; 2 if one is not known or its folder is there already.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    known = {case.name: case for case in CASES}
    for name in arguments.names or known:
        if name not in known:
            print(f"make.py: no case {name}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        try:
            print(f"{write_case(known[name], make_case(known[name]), arguments.directory)}: {known[name].happened}")
        except FileExistsError:
            print(f"make.py: {arguments.directory / name} is there already; name another directory", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
