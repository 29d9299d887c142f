"""TLS for HTTP and gRPC from files that may be replaced at any time. New connections get the newest certificate; open
ones go on."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from actors.errors import InvalidRequest
from cluster.gateway_config import TlsConfig

logger = logging.getLogger(__name__)

_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    stamps: _Stamps
    context: ssl.SSLContext
    grpc_configuration: Any


class Certificates:
    """Files are looked at whenever a client connects. Safe to use from several threads."""

    def __init__(self, tls: TlsConfig) -> None:
        """tls: with certificate_file and key_file. Raises InvalidRequest if they cannot be used."""
        self._tls = tls
        self._lock = threading.Lock()
        try:
            self._loaded = self._load()
        except (OSError, ValueError) as error:
            raise InvalidRequest("gateway.tls", str(tls.certificate_file), f"it cannot be used: {error}") from None
        self._failed: _Stamps | None = None  # told in the log

    def http_context(self) -> ssl.SSLContext:
        """For a server. A client may leave its certificate out; the HTTP layer decides what it then may ask."""
        context = self._loaded.context

        def on_hello(connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._newest().context

        context.sni_callback = on_hello  # called without a name in the hello, too
        return context

    def grpc_credentials(self) -> Any:
        """For a server. With client_ca_file every client needs a certificate."""
        needs = self._tls.client_ca_file is not None
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.grpc_configuration, lambda: self._newest().grpc_configuration, needs
        )

    def _newest(self) -> _Loaded:
        with self._lock:
            stamps = self._stamps()
            if stamps in (self._loaded.stamps, None):
                return self._loaded
            try:
                self._loaded = self._load()
                logger.info("%s was read again", self._tls.certificate_file)
            except (OSError, ValueError) as error:  # half of a new pair may be there
                if stamps != self._failed:
                    logger.warning("%s cannot be used, the one before stays: %s", self._tls.certificate_file, error)
                    self._failed = stamps
            return self._loaded

    def _files(self) -> list[Path]:
        files = (self._tls.certificate_file, self._tls.key_file, self._tls.client_ca_file)
        return [file for file in files if file is not None]

    def _stamps(self) -> _Stamps | None:
        """None: a file is not there at present."""
        try:
            found = [os.stat(file) for file in self._files()]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _load(self) -> _Loaded:
        """Raises OSError, of which ssl.SSLError is one, or ValueError."""
        stamps = self._stamps()
        certificate, key, *ca = self._files()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=_no_password)
        if ca:
            context.load_verify_locations(ca[0])
            context.verify_mode = ssl.CERT_OPTIONAL
        pair = key.read_bytes(), certificate.read_bytes()
        configuration = grpc.ssl_server_certificate_configuration([pair], ca[0].read_bytes() if ca else None)
        if stamps is None or stamps != self._stamps():
            raise ValueError("the files are changing")
        return _Loaded(stamps, context, configuration)


def _no_password() -> str:
    raise ValueError("the key has a password")  # else OpenSSL would ask on the terminal
