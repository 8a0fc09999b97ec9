"""An authority of a test's own, and certificates that it signs."""

import datetime as dt
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_LIFE = dt.timedelta(days=1)


class Authority:
    """Its own certificate is at `ca`. `issue` makes one with a key for DNS names and addresses."""

    def __init__(self, folder, name="authority"):
        self.folder, self.name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._signed(name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0)))

    def issue(self, name, *names):
        """Paths of a certificate for `names` and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(self._signed(name, key.public_key(), x509.SubjectAlternativeName([_general(each) for each in names])))
        plain = serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
        return cert, key_file

    def _signed(self, name, public, extension):
        now = dt.datetime.now(dt.UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(_called(name))
            .issuer_name(_called(self.name))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIFE)
            .not_valid_after(now + _LIFE)
            .add_extension(extension, critical=False)
        )
        return built.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _called(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
