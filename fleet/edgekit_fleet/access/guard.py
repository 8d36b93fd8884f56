"""Who sent a request: the cookie of a login, or the token of a program."""

import time
from typing import Final

from starlette.requests import HTTPConnection

from edgekit_fleet.access.logins import Login, find_login
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.access.tokens import PREFIX, principal_of_token
from edgekit_fleet.store.database import Store

COOKIE: Final = "edgekit_login"
"""Set it with `HttpOnly; SameSite=Strict; Path=/`, and `Secure` under TLS."""


def login_of(request: HTTPConnection, store: Store) -> Login | None:
    """Return the login of a request from a browser, or None."""
    secret = request.cookies.get(COOKIE, "")
    is_use = "hx-request" not in request.headers  # else htmx follows what has changed
    return find_login(store, secret, time.time(), is_use=is_use) if secret else None


def bearer_of(request: HTTPConnection, store: Store) -> Principal | None:
    """Return who holds the token of a request, or None."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.startswith(PREFIX):
        return None
    return principal_of_token(store, secret.strip(), time.time())


def principal_of(request: HTTPConnection, store: Store) -> Principal | None:
    """Return who sent a request, by cookie or token; `Principal.require` then checks the scope.

    A request by cookie that changes something also needs `Login.accepts`.
    """
    login = login_of(request, store)
    return login.principal if login is not None else bearer_of(request, store)
