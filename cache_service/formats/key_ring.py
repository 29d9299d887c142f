"""Keys that encrypt the shared cache's data in Redis.

Each secret yields one data key per namespace (HKDF with SHA-256, RFC 5869), so a namespace's key does not open another
namespace's data. The newest secret encrypts, all of them decrypt. Deleting a secret makes its data unreadable in Redis,
its files and its backups.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cache_service.errors import FormatError, FormatFault, SettingError

SECRET_BYTES = 32
_NONCE_BYTES = 12
SEAL_BYTES = _NONCE_BYTES + 16
"""Bytes that encryption adds: nonce and tag."""

MAX_KEY_ID = 2**32 - 1


class KeyRing:
    """Secrets by id; the highest id encrypts. Immutable and thread-safe. repr shows the ids only.

    Raises SettingError for an empty ring, an id outside 1 to 2**32 - 1 or a secret that is not of 32 bytes.
    """

    __slots__ = ("_secrets", "newest")

    def __init__(self, secrets: Mapping[int, bytes]) -> None:
        if not secrets:
            raise SettingError("keys", [], "a key ring needs at least one key")
        for key_id, secret in secrets.items():
            if not 1 <= key_id <= MAX_KEY_ID:
                raise SettingError("key id", key_id, f"it must be 1 to {MAX_KEY_ID}")
            if len(secret) != SECRET_BYTES:
                raise SettingError(f"length of key {key_id}", len(secret), f"it must be {SECRET_BYTES} bytes")
        self._secrets = dict(secrets)
        self.newest = max(secrets)

    def __repr__(self) -> str:
        return f"KeyRing(ids={sorted(self._secrets)})"

    def cipher(self, key_id: int, namespace: str) -> NamespaceCipher:
        """Raises FormatError if the ring lacks the key: "newer" for an id above all others, else "key" (erased)."""
        secret = self._secrets.get(key_id)
        if secret is None:
            reason: FormatFault = "newer" if key_id > self.newest else "key"
            raise FormatError(reason, f"data are encrypted with key {key_id}; the key ring has {sorted(self._secrets)}")
        return NamespaceCipher(secret, namespace)


class NamespaceCipher:
    """AES-256-GCM under a namespace's own key.

    The nonce is a keyed hash of the plaintext, as in the SIV construction (Rogaway and Shrimpton, EUROCRYPT 2006):
    equal data give equal bytes, so a segment written twice has one content address, and a bad random source cannot
    repeat a nonce.
    """

    __slots__ = ("_aead", "_nonce_key")

    def __init__(self, secret: bytes, namespace: str) -> None:
        info = b"paceline cache 1\0" + namespace.encode()
        derived = HKDF(SHA256(), length=2 * SECRET_BYTES, salt=None, info=info).derive(secret)
        self._aead = AESGCM(derived[:SECRET_BYTES])
        self._nonce_key = derived[SECRET_BYTES:]

    def encrypt(self, plain: bytes, bound: bytes) -> bytes:
        """Nonce, ciphertext and tag: SEAL_BYTES longer than `plain`. bound: authenticated data, not included."""
        bound_length = len(bound).to_bytes(4, "little")
        nonce = hmac.digest(self._nonce_key, bound_length + bound + plain, hashlib.sha256)[:_NONCE_BYTES]
        return nonce + self._aead.encrypt(nonce, plain, bound)

    def decrypt(self, sealed: bytes, bound: bytes) -> bytes:
        """Raises FormatError "key" for data encrypted with another key, namespace or `bound`."""
        if len(sealed) < SEAL_BYTES:
            raise FormatError("garbage", f"encrypted data have {len(sealed)} bytes; nonce and tag take {SEAL_BYTES}")
        try:
            return self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], bound)
        except InvalidTag:
            raise FormatError("key", "encrypted data belong to another key or place, or have been changed") from None


def parse_keys(text: str) -> KeyRing:
    """Parse `id:secret` words, each secret 64 hex digits; "#" begins a comment. Raises SettingError without secrets."""
    words = [word for line in text.splitlines() for word in line.partition("#")[0].replace(",", " ").split()]
    secrets: dict[int, bytes] = {}
    for place, word in enumerate(words, 1):
        key_id, _, secret = word.partition(":")
        if not re.fullmatch(r"[0-9]{1,10}", key_id) or not re.fullmatch(r"[0-9a-fA-F]{64}", secret):
            limit = f"each key must be id:secret, the id 1 to {MAX_KEY_ID}, the secret 64 hex digits"
            raise SettingError("keys", f"word {place}", limit)
        if int(key_id) in secrets:
            raise SettingError("keys", f"word {place}", f"there is another key {key_id}")
        secrets[int(key_id)] = bytes.fromhex(secret)
    return KeyRing(secrets)
