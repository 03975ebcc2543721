"""Certificates made in a test: an authority, servers and clients that it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority, whose certificate lies in `file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = self._signed(self.name, self._key, x509.BasicConstraints(True, None))
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(own))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate for 127.0.0.1, and of its key; written anew for the same name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert, own = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert.write_bytes(_pem(self._signed(subject, key, x509.BasicConstraints(False, None))))
        own.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert, own

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority, and may show a certificate."""
        made = ssl.create_default_context(cafile=self.file)
        if certificate is not None:
            made.load_cert_chain(*certificate)
        return made

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, kind: x509.BasicConstraints
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(kind, critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(own, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
