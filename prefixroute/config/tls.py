"""TLS settings → contexts. Files are read here, and what is wrong with one is told in a line that names it.

TLS 1.2 and newer, on either side. Verification is on unless an instance's `verify` turns it off.
"""

import hashlib
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefixroute.config.file import read_text
from prefixroute.config.settings import InstanceTlsSettings, ListenTlsSettings
from prefixroute.errors import ConfigError

_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_KEY_END = "PRIVATE KEY-----"


class ServerTls:
    """What a port listens with. `context` is its for good; what new connections get by it can be changed."""

    def __init__(self, settings: ListenTlsSettings, where: str) -> None:
        """`where`: the table's place, for messages. Raises ConfigError."""
        self.on_failure: Callable[[str], None] = lambda _cause: None
        """Gets the cause of each handshake that fails. Who closes in the middle of one, or is silent, has no cause."""
        self._where = where
        # The outer context is what the listening socket holds. Each handshake is handed on to the current one, because
        # a context can be given further authorities, but none can be taken away.
        self.context = self._current = server_context(settings, where)
        self.context.sni_callback = self._hand_on
        # Event loops tell nobody of a failed handshake: to them it is an error of the operating system's kind.
        self.context.sslobject_class = _watched(self._failed)

    def checked(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """`context`, when it can be used here. Raises ConfigError."""
        if context.verify_mode != self.context.verify_mode:
            raise ConfigError(f"{self._where}.client_ca_file: asking clients for certificates, or not, needs a restart")
        return context

    def use(self, context: ssl.SSLContext) -> None:
        """For connections that are made from now on."""
        self._current = context

    def _failed(self, error: ssl.SSLError) -> None:
        self.on_failure(error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else _reason(error))

    def _hand_on(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current


def fingerprint(table: ListenTlsSettings | InstanceTlsSettings) -> bytes:
    """A digest of the settings and of what is in the files that they name."""
    digest = hashlib.sha256()
    for name, value in table:
        content = b""
        if name.endswith("_file") and value is not None:
            with suppress(OSError):
                content = Path(value).read_bytes()
        digest.update(hashlib.sha256(repr((name, value)).encode()).digest() + hashlib.sha256(content).digest())
    return digest.digest()


def server_context(settings: ListenTlsSettings, where: str) -> ssl.SSLContext:
    """For a port that listens. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_own(context, where, settings.cert_file, settings.key_file)
    if settings.client_ca_file is not None:
        _load_authorities(context, f"{where}.client_ca_file", settings.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session is not verified again: it would outlive an authority that a reload takes away.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def client_context(settings: InstanceTlsSettings, where: str) -> ssl.SSLContext:
    """For connections to an instance. Raises ConfigError."""
    if settings.ca_file is None:
        context = ssl.create_default_context()
    else:
        context = trusting(settings.ca_file, f"{where}.ca_file")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file is not None:
        _load_own(context, where, settings.cert_file, settings.key_file or settings.cert_file)
    return context


def trusting(ca_file: str, where: str) -> ssl.SSLContext:
    """For connections to who has a certificate of the authorities in a file, and no others. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authorities(context, where, ca_file)
    return context


def _watched(on_failure: Callable[[ssl.SSLError], None]) -> type[ssl.SSLObject]:
    """What connections are wrapped in, here with an eye on their handshakes."""

    class Watched(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                on_failure(error)
                raise

    return Watched


def _load_own(context: ssl.SSLContext, where: str, cert_file: str, key_file: str) -> None:
    """The certificate that is shown, and its key."""
    # By hand first: the library does not say which of the two files it means.
    if _CERTIFICATE not in _read_pem(f"{where}.cert_file", cert_file):
        raise ConfigError(f"{where}.cert_file: {cert_file}: holds no certificate (PEM)")
    if _KEY_END not in _read_pem(f"{where}.key_file", key_file):
        raise ConfigError(f"{where}.key_file: {key_file}: holds no private key (PEM)")

    def ask_for_password() -> str:
        # The library's own way is to ask on the terminal.
        raise ConfigError(f"{where}.key_file: {key_file}: is encrypted (write it out without a password)")

    try:
        context.load_cert_chain(cert_file, key_file, ask_for_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}.key_file: {key_file}: is not the key of {cert_file}") from None
        raise ConfigError(f"{where}: {cert_file} or {key_file} cannot be used ({_reason(error)})") from None


def _load_authorities(context: ssl.SSLContext, where: str, path: str) -> None:
    if _CERTIFICATE not in _read_pem(where, path):
        raise ConfigError(f"{where}: {path}: holds no certificate (PEM)")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{where}: {path}: cannot be used ({_reason(error)})") from None


def _read_pem(where: str, path: str) -> str:
    try:
        return read_text(Path(path))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not understood").lower().replace("_", " ")
