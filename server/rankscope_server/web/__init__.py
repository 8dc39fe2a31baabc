"""
Pages, JSON API and live streams over one read model.

`install` adds all of it to an application; what the application must have in place is said in `domain.ports`.
"""

from rankscope_server.web.install import install

__all__ = ["install"]
