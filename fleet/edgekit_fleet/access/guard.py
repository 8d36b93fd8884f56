"""Finds the sender of a request by the cookie of a login or by the token of a program."""

import time
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import Response

from edgekit_fleet.access.logins import Login, find_login
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.access.tokens import PREFIX, principal_of_token
from edgekit_fleet.store.database import Store

LOGIN: Final = "edgekit_login"
BROWSER: Final = "edgekit_browser"  # stays after the login, see `LoginDesk`
_OWN_HOST: Final = "__Host-"  # a browser takes such a cookie only from this host, and only over TLS
_MAX_PORT_DIGITS: Final = 5


def cookie_name(request: HTTPConnection, name: str) -> str:
    """Return the name under which the browser stores one of our cookies.

    The name contains the port, since browsers send a host's cookies to all its ports. Without the port in the
    name, two fleets on one machine would log out each other's users. Managers that are reached at the same
    address use the same name.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    is_port = port.isascii() and port.isdecimal() and len(port) <= _MAX_PORT_DIGITS
    return f"{_OWN_HOST * is_secure(request)}{name}{f'_{port}' * is_port}"


def is_secure(request: HTTPConnection) -> bool:
    """Return whether a request came over TLS."""
    return request.url.scheme == "https"


def read_cookie(request: HTTPConnection, name: str) -> str:
    """Return the value of one of our cookies, or an empty string."""
    return request.cookies.get(cookie_name(request, name), "")


def set_cookie(
    request: HTTPConnection, response: Response, name: str, value: str, life_s: int | None = None
) -> None:
    """Set a cookie that is hidden from scripts and that the browser does not send from other sites.

    An empty `value` removes the cookie. `life_s` is the lifetime in seconds, or None to keep the cookie until
    the browser is closed.
    """
    response.set_cookie(
        cookie_name(request, name),
        value,
        life_s if value else 0,
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def login_of(request: HTTPConnection, store: Store) -> Login | None:
    secret = read_cookie(request, LOGIN)
    is_use = "hx-request" not in request.headers  # htmx asks by itself when something has changed
    return find_login(store, secret, time.time(), is_use=is_use) if secret else None


def bearer_of(request: HTTPConnection, store: Store) -> Principal | None:
    """Return the principal of the token in the `Authorization` header, or None if it is not valid.

    The time of use is stored.
    """
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.startswith(PREFIX):
        return None
    return principal_of_token(store, secret.strip(), time.time())
