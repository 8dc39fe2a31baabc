"""
Certificates, made when a test needs them.
"""

import ssl
from pathlib import Path

import trustme


def write(path: Path, *parts: trustme.Blob) -> Path:
    """A file of these parts that only its owner can read; it replaces what was there at once."""
    made = path.with_suffix(".new")
    made.write_bytes(b"".join(part.bytes() for part in parts))
    made.chmod(0o600)
    return made.replace(path)


class Authority:
    """An authority, and the files of whatever it has issued."""

    def __init__(self, directory: Path, name: str) -> None:
        self.ca = trustme.CA()
        self.directory = directory
        self.ca_file = write(directory / f"{name}-ca.pem", self.ca.cert_pem)

    def pair(self, name: str, identity: str = "127.0.0.1", **options: object) -> tuple[Path, Path]:
        """The files of a new certificate of `identity` and of its key."""
        issued = self.ca.issue_cert(identity, **options)
        cert = write(self.directory / f"{name}.pem", *issued.cert_chain_pems)
        return cert, write(self.directory / f"{name}.key", issued.private_key_pem)

    def issue(self, name: str = "server", identity: str = "127.0.0.1", **options: object) -> dict[str, Path]:
        """The exporter's settings for a new certificate."""
        cert, key = self.pair(name, identity, **options)
        return {"tls_cert_file": cert, "tls_key_file": key}

    def client(self, *, certificate_of: "Authority | None" = None) -> ssl.SSLContext:
        """A client that trusts this authority, perhaps with a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        if certificate_of is not None:
            certificate_of.ca.issue_cert("client.example").configure_cert(context)
        return context
