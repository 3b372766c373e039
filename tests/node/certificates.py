"""Authorities and certificates, made for a test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority"]

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates, and has one of its own at ``file``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._sign(self._name, self._key, authority=True).public_bytes(_PEM))

    def issue(self, name: str, *others: str, expired: bool = False) -> Path:
        """A file with a certificate of that common name, for this host and ``others`` too, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, *others, expired=expired)
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        file = self._folder / f"{name}.pem"
        file.write_bytes(made.public_bytes(_PEM) + secret)
        return file

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *others: str,
        authority: bool = False,
        expired: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * _DAY)
            .not_valid_after(now - _DAY if expired else now + _DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if authority:
            usage = dict.fromkeys(("digital_signature", "key_cert_sign", "crl_sign"), True)
            unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
            usage |= dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
            builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        else:
            names = [here, *map(x509.DNSName, others)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


_PEM = serialization.Encoding.PEM
