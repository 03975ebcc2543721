"""The files that TLS needs, and the server's context made from them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from headrace.config.file_stamp import stamp_of


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    Attributes:
        cert: the server's certificate, then those between it and its root.
        key: its private key, not encrypted.
        client_ca: certificates of the authorities whose clients may connect; None for any client.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a server's context: TLS 1.2 or newer, with Python's choice of ciphers.

        Raises:
            ValueError: a file cannot be used; the message names it.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        made.set_alpn_protocols(["http/1.1"])
        for file in (self.cert, self.key, self.client_ca):
            if file is not None:
                _check_readable(file)
        try:
            # Without `password`, OpenSSL would ask for one on the terminal.
            made.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"{self.cert} and {self.key} are not a PEM certificate and its unencrypted private "
                f"key: {_reason(error)}"
            ) from None
        if self.client_ca is not None:
            try:
                made.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise ValueError(
                    f"{self.client_ca} holds no PEM certificates: {_reason(error)}"
                ) from None
            made.verify_mode = ssl.CERT_REQUIRED
        return made

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes when a file does."""
        return tuple(stamp_of(file) for file in (self.cert, self.key, self.client_ca) if file)


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; write it without a pass phrase")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
