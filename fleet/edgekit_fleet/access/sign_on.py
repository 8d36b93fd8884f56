"""Single sign-on: a proxy logs users in and names them in headers, as oauth2-proxy does.

    X-Auth-Request-Preferred-Username: ann
    X-Auth-Request-Email: ann@example.org
    X-Auth-Request-Groups: staff,edge-admins

Anybody can send such headers. So they are accepted only from the addresses of the proxies, with the secret of
the proxy if one is set, and each header at most once. A request with these headers from anybody else is
refused and raises an alarm. The HTTP interface ignores the headers, since programs use tokens.

Users of the proxy have no password here, and cannot use the name of a user with a password. Otherwise,
somebody could become an administrator by choosing a name at the identity provider. A login is only valid in
requests whose headers state the same name and role. So a user who is blocked at the identity provider, or
moved to other groups, is logged out at once.
"""

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from sqlalchemy.orm import Session
from starlette.requests import HTTPConnection

from edgekit_fleet.access import failure_limit
from edgekit_fleet.access.client_network import PEER
from edgekit_fleet.access.logins import Login, open_login
from edgekit_fleet.access.principal import Role
from edgekit_fleet.access.tokens import end_grants_of
from edgekit_fleet.access.users import NAME_FORM
from edgekit_fleet.store import audit
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import UserRow
from edgekit_runtime.errors import ConfigError, RequestError

SECRET_HEADER: Final = "x-edgekit-proxy-secret"  # noqa: S105  # a name
_ENDS: Final = ("preferred-username", "email", "groups", "user")
_ROLES: Final[tuple[Role, ...]] = get_args(Role)
_MIN_SECRET_CHARS: Final = 20


class SpoofedHeadersError(RequestError):
    """A request has the headers of a proxy, but does not come from the proxy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user whom a proxy has logged in, and the role that follows from their groups."""

    name: str
    role: Role


def fits_login(identity: Identity | None, login: Login) -> bool:
    """Return True if a request with this identity may use the login.

    `identity` is None for a request without headers of a proxy. It may only use a login with a password.
    """
    if identity is None:
        return login.signed_on_role is None
    return identity.name == login.principal.name and login.signed_on_role in (None, identity.role)


class SignOn:
    """Reads the headers in which a proxy names the user."""

    def __init__(self, settings: FleetSettings) -> None:
        """Read the settings and the secret.

        Raises:
            ConfigError: The secret cannot be read, or is too short.
        """
        self._proxies = [ipaddress.ip_network(proxy, strict=False) for proxy in settings.sign_on_proxies]
        self._prefix = settings.sign_on_headers.lower()
        self._roles = dict(pair.rsplit("=", 1) for pair in settings.sign_on_roles)
        self._secret = _read_secret(settings.sign_on_secret)

    def read(self, request: HTTPConnection) -> Identity | None:
        """Return the user whom the headers name, or None if there are no such headers or no proxy is set up.

        Raises:
            SpoofedHeadersError: 403, the sender is not the proxy, or did not send the proxy's secret.
            RequestError: 400, a header is malformed or repeated. 403, no group of the user has a role.
        """
        headers = {end: request.headers.getlist(f"{self._prefix}-{end}") for end in _ENDS}
        if not self._proxies or not any(headers.values()):
            return None
        self._check_sender(request)
        if any(len(values) > 1 for values in headers.values()):
            raise RequestError(400, f"the proxy sends a header of {self._prefix} twice")
        name, email, groups, _ = ("".join(values).strip() for values in headers.values())
        name = name or email
        if not NAME_FORM.fullmatch(name):
            raise RequestError(
                400, f"the proxy names the user {name[:80]!r}, expected a-z, 0-9, '.', '_', '@', '-'"
            )
        return Identity(name, self._find_role(name, groups.split(",")))

    def _check_sender(self, request: HTTPConnection) -> None:
        peer = request.scope.get(PEER, "")
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            address = None
        mapped = getattr(address, "ipv4_mapped", None) or address
        secrets = request.headers.getlist(SECRET_HEADER)
        is_right = not self._secret or (
            len(secrets) == 1 and hmac.compare_digest(secrets[0].encode(errors="replace"), self._secret)
        )
        if mapped is None or not any(mapped in proxy for proxy in self._proxies) or not is_right:
            raise SpoofedHeadersError(
                403, f"{peer} names a user in headers, and is no proxy of --sign-on-proxy"
            )

    def _find_role(self, name: str, groups: Sequence[str]) -> Role:
        roles = {self._roles.get(group.strip()) for group in groups}
        for role in reversed(_ROLES):
            if role in roles:
                return role
        raise RequestError(403, f"no group of '{name}' has a role here; see --sign-on-role")


def open_signed_on(session: Session, identity: Identity, now: float) -> str:
    """Log in a user whom a proxy names, and return the secret of the login.

    A new user is added. A known user gets the role that the proxy states.

    Raises:
        RequestError: 403, a user with a password has this name. 429, the user logs in too often.
    """
    limits = {f"sign-ons of {identity.name}": failure_limit.MAX_FAILURES}
    if not failure_limit.take(session, limits, now):  # each is an entry of the audit log
        raise failure_limit.too_many("logins")
    row = session.get(UserRow, identity.name)
    if row is None:
        session.add(UserRow(name=identity.name, password_digest="", role=identity.role, created_at=now))
        audit.record(session, "proxy", "user.add", identity.name, role=identity.role)
    elif row.password_digest:
        raise RequestError(
            403, f"'{identity.name}' is a user with a password; remove it, or use another name at the proxy"
        )
    elif row.role != identity.role:
        if row.role == "admin":
            end_grants_of(session, identity.name, actor="proxy")
        row.role = identity.role
        audit.record(session, "proxy", "user.role", identity.name, role=identity.role)
    return open_login(session, identity.name, now)


def _read_secret(path: str) -> bytes:
    if not path:
        return b""
    try:
        secret = Path(path).read_text().strip()
    except (OSError, ValueError) as cause:
        raise ConfigError(f"--sign-on-secret {path}: cannot be read: {cause}") from cause
    if len(secret) < _MIN_SECRET_CHARS:
        raise ConfigError(f"--sign-on-secret {path}: is shorter than {_MIN_SECRET_CHARS} characters")
    return secret.encode()
