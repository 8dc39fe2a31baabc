"""
Modules loaded from a file under a name of the test's own: hooks and fix change functions and classes of a module, so each test that puts them on has a copy.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(path: Path, name: str) -> ModuleType:
    """
    The module in `path`, as `name`; it replaces one that was loaded under that name before.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
