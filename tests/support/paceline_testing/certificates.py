"""A certificate authority for tests."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Issues certificates for localhost. `file`: its own certificate, PEM."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        self.file = directory / "authority.pem"
        built = _certificate(self._name, self._key, self._name).add_extension(x509.BasicConstraints(True, None), True)
        self.file.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, stem: str, common_name: str) -> tuple[Path, Path]:
        """Files of a new certificate and its key; those before with the same stem are overwritten."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
        built = _certificate(_name(common_name), key, self._name).add_extension(names, False)
        signed = built.sign(self._key, hashes.SHA256())
        files = self._directory / f"{stem}.pem", self._directory / f"{stem}.key"
        files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        encryption = serialization.NoEncryption()
        files[1].write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return files


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        now - timedelta(hours=1),
        now + timedelta(days=1),
    )
