"""Endpoints of users, tokens and webhooks."""

from dataclasses import dataclass
from typing import Annotated

from edgekit_fleet.access import tokens, users
from edgekit_fleet.access.principal import SCOPES_OF_ROLE, Principal, Role, Scope
from edgekit_fleet.access.second_factor import NewSecondFactor, add_factor, remove_factor
from edgekit_fleet.access.tokens import Token
from edgekit_fleet.access.users import User
from edgekit_fleet.api.endpoints.endpoint import Fleet, Named, Nothing, endpoint
from edgekit_fleet.operations import webhooks
from edgekit_fleet.operations.webhooks import Webhook
from edgekit_runtime.dataclass_json import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class UserList:
    """All users, sorted by name.

    Attributes:
        items: The users.
    """

    items: tuple[User, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddUser:
    """A new user.

    Attributes:
        name: The login name.
        password: The password, at least 10 characters.
        role: The role of the user.
    """

    name: str
    password: str
    role: Role = "viewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPassword:
    """A new password for a user. It ends the user's logins.

    Attributes:
        name: The name of the user.
        password: The password, at least 10 characters.
    """

    name: str
    password: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """A new role for a user.

    Attributes:
        name: The name of the user.
        role: The new role.
    """

    name: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """All tokens, sorted by name.

    Attributes:
        items: The tokens.
    """

    items: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddToken:
    """A new token.

    Attributes:
        name: The name of the token.
        scopes: The scopes of the token. The caller must have all of them.
        days: The lifetime in days, or null if the token does not expire.
    """

    name: str
    scopes: tuple[Scope, ...]
    days: Annotated[float | None, Range(0.001, 3650)] = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token with its secret, which is shown once.

    Attributes:
        name: The name of the token.
        token: The secret.
    """

    name: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookList:
    """All webhooks, sorted by name.

    Attributes:
        items: The webhooks.
    """

    items: tuple[Webhook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddWebhook:
    """A new webhook. It receives the events from now on.

    Attributes:
        name: The name of the webhook.
        url: An `https` URL, or an `http` URL on this machine.
        actions: The prefixes of audit log actions to send, such as `rollout.`. If empty, all are sent.
    """

    name: str
    url: str
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook:
    """A webhook with its secret, which is shown once.

    Attributes:
        name: The name of the webhook.
        secret: The secret that signs the messages, `whsec_...`.
    """

    name: str
    secret: str


@endpoint("GET", "/users", scope="admin", summary="List the users.")
def list_users(fleet: Fleet, _principal: Principal, _request: Nothing) -> UserList:
    with fleet.store.snapshot() as session:
        return UserList(items=tuple(users.list_users(session)))


def _require_role(principal: Principal, role: str) -> None:
    """Check that a principal has all scopes of a role, since nobody can grant more than they have."""
    for scope in sorted(SCOPES_OF_ROLE.get(role, ())):  # type: ignore[call-overload]  # an unknown role is refused later
        principal.require(scope)


@endpoint("POST", "/users", scope="admin", summary="Add a user.", status=201)
def add_user(fleet: Fleet, principal: Principal, request: AddUser) -> UserList:
    _require_role(principal, request.role)
    with fleet.store.transaction() as session:
        users.add_user(session, request.name, request.password, request.role, actor=principal.name)
    return list_users.run(fleet, principal, Nothing())


@endpoint(
    "POST",
    "/users/{name}/password",
    scope="admin",
    summary="Give a user another password, and end their logins.",
)
def set_password(fleet: Fleet, principal: Principal, request: SetPassword) -> UserList:
    with fleet.store.transaction() as session:
        _require_role(principal, users.find_role(session, request.name))
        users.set_password(session, request.name, request.password, actor=principal.name)
    return list_users.run(fleet, principal, Nothing())


@endpoint("POST", "/users/{name}/role", scope="admin", summary="Give a user another role.")
def set_role(fleet: Fleet, principal: Principal, request: SetRole) -> UserList:
    _require_role(principal, request.role)
    with fleet.store.transaction() as session:
        users.set_role(session, request.name, request.role, actor=principal.name)
    return list_users.run(fleet, principal, Nothing())


@endpoint(
    "POST",
    "/users/{name}/second-factor",
    scope="admin",
    summary="Give a user a second factor, which each login needs from now on.",
    status=201,
    is_secret=True,
)
def add_second_factor(fleet: Fleet, principal: Principal, request: Named) -> NewSecondFactor:
    with fleet.store.transaction() as session:
        _require_role(principal, users.find_role(session, request.name))
        return add_factor(session, request.name, actor=principal.name, is_confirmed=True)


@endpoint(
    "DELETE", "/users/{name}/second-factor", scope="admin", summary="Remove the second factor of a user."
)
def remove_second_factor(fleet: Fleet, principal: Principal, request: Named) -> UserList:
    with fleet.store.transaction() as session:
        _require_role(principal, users.find_role(session, request.name))
        remove_factor(session, request.name, actor=principal.name)
    return list_users.run(fleet, principal, Nothing())


@endpoint("DELETE", "/users/{name}", scope="admin", summary="Remove a user.")
def remove_user(fleet: Fleet, principal: Principal, request: Named) -> UserList:
    with fleet.store.transaction() as session:
        users.remove_user(session, request.name, actor=principal.name)
    return list_users.run(fleet, principal, Nothing())


@endpoint("GET", "/tokens", scope="admin", summary="List the tokens, without their secrets.")
def list_tokens(fleet: Fleet, _principal: Principal, _request: Nothing) -> TokenList:
    with fleet.store.snapshot() as session:
        return TokenList(items=tuple(tokens.list_tokens(session)))


@endpoint("POST", "/tokens", scope="admin", summary="Make a token of a program.", status=201, is_secret=True)
def add_token(fleet: Fleet, principal: Principal, request: AddToken) -> NewToken:
    for scope in request.scopes:
        principal.require(scope)
    life_s = None if request.days is None else request.days * 86_400
    with fleet.store.transaction() as session:
        secret = tokens.add_token(session, request.name, request.scopes, actor=principal.name, life_s=life_s)
    return NewToken(name=request.name, token=secret)


@endpoint("DELETE", "/tokens/{name}", scope="admin", summary="End a token.")
def revoke_token(fleet: Fleet, principal: Principal, request: Named) -> TokenList:
    with fleet.store.transaction() as session:
        tokens.revoke_token(session, request.name, actor=principal.name)
    return list_tokens.run(fleet, principal, Nothing())


@endpoint("GET", "/webhooks", scope="admin", summary="List the webhooks, and whether their messages arrive.")
def list_webhooks(fleet: Fleet, _principal: Principal, _request: Nothing) -> WebhookList:
    return WebhookList(items=tuple(webhooks.list_webhooks(fleet.store)))


@endpoint(
    "POST",
    "/webhooks",
    scope="admin",
    summary="Call a URL when something happens in the fleet.",
    status=201,
    is_secret=True,
)
def add_webhook(fleet: Fleet, principal: Principal, request: AddWebhook) -> NewWebhook:
    secret = webhooks.add_webhook(
        fleet.store, request.name, request.url, request.actions, actor=principal.name
    )
    return NewWebhook(name=request.name, secret=secret)


@endpoint("DELETE", "/webhooks/{name}", scope="admin", summary="Delete a webhook.")
def remove_webhook(fleet: Fleet, principal: Principal, request: Named) -> WebhookList:
    webhooks.remove_webhook(fleet.store, request.name, actor=principal.name)
    return list_webhooks.run(fleet, principal, Nothing())
