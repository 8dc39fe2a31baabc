"""
Who asks.
"""

from starlette.requests import Request


def actor_of(request: Request) -> str:
    """
    Name of the user who signed in, as the application left it on the request; `local` where nobody has to.
    """
    return str(getattr(request.state, "actor", "local"))
