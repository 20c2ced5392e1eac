"""What keeps a running router safe, as configured: keys, tokens, certificates, permissions of web pages.

Everything is read from variables and files at once, and again on a reload: whole, or not at all.
"""

import logging
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prefixroute.config.access_keys import AccessKey, access_key_file_warnings, read_access_keys_of
from prefixroute.config.api_keys import ApiKey, key_file_warnings, read_api_keys
from prefixroute.config.secrets import admin_token, api_key
from prefixroute.config.settings import Settings, is_loopback
from prefixroute.config.tls import ServerTls, client_context, fingerprint, server_context
from prefixroute.http.auth import AdminToken, ApiKeys, Gate
from prefixroute.http.cors import Cors
from prefixroute.sagemaker.sigv4 import Verifier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedSecurity:
    """What variables and files hold, all of it good."""

    settings: Settings
    api_keys: tuple[ApiKey, ...] | None
    access_keys: tuple[AccessKey, ...] | None = field(repr=False)
    admin_token: str | None = field(repr=False)
    contexts: tuple[tuple[ServerTls, ssl.SSLContext], ...]
    instance_keys: dict[str, str] = field(repr=False)
    """By instance name."""
    instance_tls: dict[str, tuple[ssl.SSLContext, str | None]]
    """By instance name: the context, and the name that certificates are checked against (None: the host's)."""
    fingerprints: dict[str, bytes]
    """Of certificates and their keys, by the port or the instance's name."""
    warnings: tuple[str, ...] = ()
    """What makes the API keys easy to come by."""


class Security:
    """Of one router. Raises ConfigError when something that the settings name cannot be used."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str] | None = None, *, clock: Callable[[], float]
    ) -> None:
        self.gate = Gate()
        """Of the data port."""
        self.signatures: Verifier | None = None
        """Of AWS's kind, on the paths of endpoints; None: they are not looked at."""
        self.admin_token = AdminToken()
        self.listen_tls: ServerTls | None = None
        self.admin_tls: ServerTls | None = None
        self._environ = os.environ if environ is None else environ
        self._clock = clock
        if settings.listen.tls is not None:
            self.listen_tls = ServerTls(settings.listen.tls, "listen.tls")
        if settings.admin is not None and settings.admin.tls is not None:
            self.admin_tls = ServerTls(settings.admin.tls, "admin.tls")
        self._told: set[str] = set()
        self._machine: ssl.SSLContext | None = None
        self._now: PreparedSecurity | None = None
        self.commit(self.prepare(settings))

    @property
    def now(self) -> PreparedSecurity:
        """What is in force."""
        if self._now is None:
            raise RuntimeError("nothing is in force yet")
        return self._now

    @property
    def instance_keys(self) -> dict[str, str]:
        """As `PreparedSecurity` has it."""
        return self.now.instance_keys

    @property
    def instance_tls(self) -> dict[str, tuple[ssl.SSLContext, str | None]]:
        """As `PreparedSecurity` has it."""
        return self.now.instance_tls

    def reload(self) -> None:
        """Reads all variables and files again. Raises ConfigError, and then nothing has changed."""
        self.commit(self.prepare(self.now.settings))

    def prepare(self, settings: Settings) -> PreparedSecurity:
        """Reads what `settings` name, and changes nothing. Raises ConfigError.

        Whether a port has TLS, and asks clients for certificates, needs a restart.
        """
        listen, admin = settings.listen, settings.admin
        ports = (
            ("listen.tls", self.listen_tls, listen.tls),
            ("admin.tls", self.admin_tls, None if admin is None else admin.tls),
        )
        # An instance's name has no space.
        prints = {f"port {where}": fingerprint(table) for where, _, table in ports if table is not None}
        prints |= {i.name: fingerprint(i.tls) for i in settings.fleet.instances if i.tls is not None}
        keys_file = None if listen.api_keys_file is None else Path(listen.api_keys_file)
        api_keys = None if keys_file is None else read_api_keys(keys_file)
        access_file = settings.sagemaker.access_keys_file
        access_keys = read_access_keys_of(settings, api_keys)
        return PreparedSecurity(
            settings,
            api_keys=api_keys,
            access_keys=access_keys,
            admin_token=None if admin is None else admin_token(admin, self._environ),
            contexts=tuple(
                (port, port.checked(server_context(table, where)))
                for where, port, table in ports
                if port is not None and table is not None
            ),
            instance_keys={
                i.name: key for i in settings.fleet.instances if (key := api_key(i, self._environ)) is not None
            },
            instance_tls=self._instance_tls(settings, prints),
            fingerprints=prints,
            warnings=(
                *(() if keys_file is None or api_keys is None else key_file_warnings(keys_file, api_keys)),
                *(
                    ()
                    if access_file is None or access_keys is None
                    else access_key_file_warnings(Path(access_file), access_keys)
                ),
            ),
        )

    def differences(self, prepared: PreparedSecurity) -> tuple[str, ...]:
        """What variables and files hold that is other than it was, for people; the settings may be the same."""
        now = self.now
        found = {
            "API keys": prepared.api_keys != now.api_keys,
            "access keys": prepared.access_keys != now.access_keys,
            "admin token": prepared.admin_token != now.admin_token,
            "keys of instances": prepared.instance_keys != now.instance_keys,
            "certificates": prepared.fingerprints != now.fingerprints,
        }
        return tuple(name for name, differs in found.items() if differs)

    def _instance_tls(
        self, settings: Settings, prints: Mapping[str, bytes]
    ) -> dict[str, tuple[ssl.SSLContext, str | None]]:
        """A context is made anew only for what is new: connections that were made with the old one may go on then."""
        now = self._now
        made: dict[str, tuple[ssl.SSLContext, str | None]] = {}
        for index, instance in enumerate(settings.fleet.instances):
            table, name = instance.tls, instance.name
            if table is None:
                if instance.url.startswith("https://"):
                    # One for all of them: it holds hundreds of authorities, and takes a while to make.
                    self._machine = self._machine or ssl.create_default_context()
                    made[name] = self._machine, None
            elif now is not None and now.fingerprints.get(name) == prints[name]:
                made[name] = now.instance_tls[name]
            else:
                made[name] = (client_context(table, f"fleet.instances[{index}].tls"), table.server_name)
        return made

    def commit(self, prepared: PreparedSecurity) -> None:
        """Makes it so, for requests and connections that begin from now on. Those under way go on, and count."""
        settings, gate = prepared.settings, self.gate
        for port, context in prepared.contexts:
            port.use(context)
        self.signatures = None if prepared.access_keys is None else Verifier(prepared.access_keys)
        if prepared.api_keys is None and prepared.access_keys is None:
            gate.api_keys = None
        else:
            # Where there are access keys alone, nobody gets in without one: on other paths, nobody at all.
            gate.api_keys = gate.api_keys or ApiKeys(self._clock)
            gate.api_keys.use(
                prepared.api_keys or (),
                prepared.access_keys or (),
                max_in_flight=settings.limits.per_key_in_flight,
                requests_per_minute=settings.limits.per_key_requests_per_minute,
            )
        gate.cors = None if settings.listen.cors is None else Cors(settings.listen.cors)
        gate.isolates = settings.routing.isolate_by == "api_key"
        self.admin_token.use(prepared.admin_token)
        self._now = prepared

    def tell_openness(self) -> None:
        """Warns of what is open, where that may not be meant; once of each."""
        for message in set(self._openness()) - self._told:
            self._told.add(message)
            _log.warning("%s", message)

    def _openness(self) -> Iterator[str]:
        listen = self.now.settings.listen
        asks_for_certificates = listen.tls is not None and listen.tls.client_ca_file is not None
        has_keys = self.gate.api_keys is not None
        if not has_keys and not asks_for_certificates and not is_loopback(listen.host):
            yield f"whoever reaches {listen.host} may use the instances (listen.api_keys_file asks for keys)"
        for instance in self.now.settings.fleet.instances:
            if instance.tls is not None and not instance.tls.verify:
                yield f"{instance.name}: its certificate is not checked (tls.verify is false)"
        yield from self.now.warnings
