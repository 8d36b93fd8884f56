"""Writes an HAProxy configuration for several replicas of `edgekit offload serve`.

If a replica dies, HAProxy sends its requests to another one. This is safe because inference has no side
effects. HAProxy must buffer the whole request for this, so its buffer is large enough for the inputs of the
tails. If a replica dies in the middle of an answer, the device gets a truncated answer and rejects it.

The memory is limited in two ways. HAProxy reads a body only after it has checked the token, and limits the
number of connections so that all buffers fit into a given amount of memory. The body is read by the rule
`wait-for-body`, because the option `http-buffer-request` would read it before the token is checked.

Source: HAProxy 2.6 configuration manual, sections "retry-on", "option redispatch", "http-check",
"http-request wait-for-body", "http_auth_bearer", "secure_memcmp" and "maxconn".
"""

import re
from pathlib import Path
from typing import Final

from edgekit_offload.export.tails import Tail
from edgekit_runtime.client.link import Address
from edgekit_runtime.errors import CutError, TransportError
from edgekit_runtime.system.atomic_files import write_text_atomically

_LEAST_BUFFER_BYTES: Final = 64 << 10
_LARGEST_BUFFER_BYTES: Final = 16 << 20  # larger requests are not repeated
_MEMORY_BYTES: Final = 2 << 30  # limit for all connections together
_BUFFERS: Final = 4  # most buffers of one connection: 3 during a slow upload, 4 with an unread answer
_CONNECTION_BYTES: Final = 128 << 10  # TLS, and the rest of a connection's state
_MOST_CONNECTIONS: Final = 4096  # as many devices as `edgekit offload serve` accepts
_HEAD_BYTES: Final = 16 << 10
_ROWS: Final = 4  # rows of the largest request that fits
_HOST: Final = re.compile(r"[A-Za-z0-9_.:-]+")  # no character that ends a word of the configuration

# Without a name HAProxy accepts any certificate of the authority. It reads names only: an IP address in the
# certificate counts only as the common name.
_TLS: Final = " ssl verify required ca-file ca.pem verifyhost {host}"

_ACCESS: Final = """\
    # This comes before the body is read. Without the variable EDGEKIT_TOKEN all requests are refused.
    http-request set-var(txn.token) env(EDGEKIT_TOKEN)
    acl has_token http_auth_bearer,secure_memcmp(txn.token)
    http-request return status 401 content-type application/json hdr WWW-Authenticate Bearer \
string '{"error":"the bearer token is missing or wrong"}' unless has_token
"""

_TEMPLATE: Final = """\
# Written by `edgekit offload export --format haproxy`. Check it: haproxy -c -f haproxy.cfg
global
    # The whole request must fit, or it cannot be sent again when a replica dies.
    tune.bufsize {buffer_bytes}
    # {buffers} buffers for each connection take at most {memory_mib} MiB; further connections wait.
    maxconn {connections}
    hard-stop-after 30s

defaults
    mode http
    # With TLS, so three round trips. A request whose connection failed waits as long, at most a second,
    # before it goes to the only replica that is left.
    timeout connect 300ms
    timeout client 75s
    timeout server 30s
    timeout http-request 10s
    timeout queue 5s
    # An inference changes nothing, so a request may be sent again to another replica: when the connection
    # fails, and when a replica dies before its answer. Not after a time limit, which would double the load.
    retry-on conn-failure empty-response
    retries {retries}
    option redispatch 1

frontend inference
    bind {listen}{bind_tls}
{access}    # Only a whole request can be sent again. A slow link needs longer for a body than for a head.
    http-request wait-for-body time 60s
    default_backend replicas

backend replicas
    balance leastconn
    http-reuse always
    option httpchk
    http-check send meth GET uri /v2/health/ready ver HTTP/1.1 hdr Host localhost{authorization}
    http-check expect status 200
    # A replica that fails a request is checked at once; one that ends by SIGTERM answers what it has, and
    # refuses new connections, which are then opened to another one.
    default-server check inter 500ms fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down
{servers}
"""


def write_haproxy(
    tails: tuple[Tail, ...], folder: Path, replicas: tuple[str, ...], *, insecure: bool = False
) -> None:
    """Write `haproxy.cfg`, which distributes requests to replicas of `edgekit offload serve`.

    Args:
        tails: The models, which determine the size of requests.
        folder: The folder of the file, created if missing.
        replicas: `HOST:PORT` or `https://HOST:PORT` of each replica. With https, HAProxy reads the CA
            certificate of the replicas from `ca.pem`, its own certificate from `haproxy.pem`, and a token
            from the variable EDGEKIT_TOKEN. Devices must send this token, and health checks send it to the
            replicas.
        insecure: Whether plain HTTP to other machines is allowed.

    Raises:
        CutError: There are no replicas, or an address is malformed.
        ConfigError: A replica on another machine uses plain HTTP, which is not allowed.
        OutputError: The file cannot be written.
    """
    addresses = [_parse(replica, insecure=insecure) for replica in replicas]
    if not addresses:
        raise CutError("haproxy: no replicas; add --replica HOST:PORT for each `edgekit offload serve`")
    uses_tls = any(address.is_tls for address in addresses)
    needed = _HEAD_BYTES + _ROWS * max(tail.request_bytes for tail in tails)
    buffer_bytes = min(max(needed, _LEAST_BUFFER_BYTES), _LARGEST_BUFFER_BYTES)
    servers = [
        f"    server replica{number} {address}" + (_TLS.format(host=address.host) * address.is_tls)
        for number, address in enumerate(addresses, 1)
    ]
    text = _TEMPLATE.format(
        buffer_bytes=buffer_bytes,
        memory_mib=_MEMORY_BYTES >> 20,
        buffers=_BUFFERS,
        connections=min(_MOST_CONNECTIONS, _MEMORY_BYTES // (_BUFFERS * buffer_bytes + _CONNECTION_BYTES)),
        retries=max(len(addresses), 3),
        listen="*:8443" if uses_tls else "127.0.0.1:8090",
        bind_tls=" ssl crt haproxy.pem" if uses_tls else "",
        access=_ACCESS if uses_tls else "",
        authorization=' hdr Authorization "Bearer ${EDGEKIT_TOKEN}"' if uses_tls else "",
        servers="\n".join(servers),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / "haproxy.cfg", text)


def _parse(replica: str, *, insecure: bool) -> Address:
    try:
        address = Address.parse(replica, insecure=insecure)
    except TransportError as cause:
        raise CutError(f"haproxy: replica {replica!r}: {cause}") from cause
    if address.path is not None or _HOST.fullmatch(address.host) is None:
        raise CutError(f"haproxy: replica {replica!r} is no HOST:PORT and no https://HOST:PORT")
    return address
