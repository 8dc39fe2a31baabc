"""
Why a flight file cannot be read.

* FlightError: a file that is no flight file, that is damaged, or that cannot be opened
  * FlightVersionError: a flight file of another version than this reader's
"""


class FlightError(Exception):
    """
    A file that is no flight file, one of another version, or one that is cut short; the message says which.
    """


class FlightVersionError(FlightError):
    """
    A flight file of another version; the message says which side is older, and what to do about it.
    """

    def __init__(self, name: str, version: int, known: int) -> None:
        self.version = version
        if version < known:
            remedy = "restart its vLLM with the exporter that is installed now, or read the file with the release that wrote it"
        else:
            remedy = "upgrade rankscope-exporter here"
        age = "older" if version < known else "newer"
        super().__init__(
            f"{name}: flight file version {version} is {age} than this reader, which knows {known}: {remedy}"
        )
