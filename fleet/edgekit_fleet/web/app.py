"""The routes of the web server for devices.

    GET  /authority              the certificate of the authority in PEM
    POST /enrol, /renew          an `EnrolmentRequest` or `RenewalRequest`, answered with an `Enrolment`
    GET  /artifacts/metadata/*   TUF metadata
    GET  /artifacts/targets/*    packages and deltas, with Range requests
    PUT  /samples/ID             samples from a device with a certificate, see `sample_uploads`

All downloads are signed, so they need no login.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from edgekit_fleet.access import failure_limit
from edgekit_fleet.access.client_network import find_network
from edgekit_fleet.identity import enrolment
from edgekit_fleet.identity.authority import Authority, SignedCertificate
from edgekit_fleet.releases.artifact_storage import CHANGING, IMMUTABLE
from edgekit_fleet.releases.manager_key import read_newest_root
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import DeviceRow
from edgekit_fleet.web.request_body import read_body
from edgekit_fleet.web.sample_uploads import SampleUploads, UploadLimits
from edgekit_runtime.agent.documents import Enrolment, EnrolmentRequest, PackageKey, RenewalRequest
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import EdgekitError, RequestError, SignatureError
from edgekit_runtime.system.atomic_files import make_folders
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX, list_keys

_MAX_BODY_BYTES: Final = 32 << 10
_BODY_S: Final = 10.0
_RECORD_BYTES: Final = 4 << 10
_CHUNK_BYTES: Final = (
    16 << 10
)  # that a download reads at a time. Starlette's 64 KiB are 32 MiB for 500 slow ones
_log = logging.getLogger(__name__)

Body = TypeVar("Body", EnrolmentRequest, RenewalRequest)


class _Artifacts(StaticFiles):
    """The files of the repository. Only `timestamp.json` changes without changing its name.

    They are sent in small TLS records, because a partly received record is lost when the connection breaks.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_pieces(message: Message) -> None:
            body = memoryview(message.get("body", b""))
            begin = 0
            while len(body) - begin > _RECORD_BYTES:
                piece = bytes(body[begin : begin + _RECORD_BYTES])
                await send({"type": message["type"], "body": piece, "more_body": True})
                begin += _RECORD_BYTES
            await send({**message, "body": bytes(body[begin:])} if begin else message)

        await super().__call__(scope, receive, send_pieces)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if isinstance(response, FileResponse):
            response.chunk_size = _CHUNK_BYTES
        is_fixed = not path.endswith("timestamp.json")
        response.headers["cache-control"] = IMMUTABLE if is_fixed else CHANGING
        return response


class EnrolmentPages:
    """Enrolment and renewal over HTTP."""

    def __init__(
        self, store: Store, folder: FleetFolder, settings: FleetSettings, authority: Authority
    ) -> None:
        self._store = store
        self._folder = folder
        self._settings = settings
        self._authority = authority

    async def show_authority(self, _request: Request) -> Response:
        """Return the certificate of the authority."""
        return Response(self._authority.certificate_path.read_bytes(), media_type="application/x-pem-file")

    async def enrol(self, request: Request) -> Response:
        return await self._answer(request, EnrolmentRequest, self._enrol)

    async def renew(self, request: Request) -> Response:
        """Answer a renewal request."""
        return await self._answer(request, RenewalRequest, self._renew)

    async def _answer(
        self, request: Request, kind: type[Body], carry_out: Callable[[Body], Enrolment]
    ) -> Response:
        address = request.client.host if request.client else ""
        try:
            data = await read_body(request, _MAX_BODY_BYTES, _BODY_S)
            answer = await run_in_threadpool(self._carry_out, address, data, kind, carry_out)
        except RequestError as refusal:
            after = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
            return PlainTextResponse(f"{refusal}\n", refusal.status, after)
        except SignatureError as error:
            _log.warning("%s from %s refused: %s", request.url.path, address, error)
            return PlainTextResponse(f"{error}\n", 403)
        except EdgekitError as error:
            _log.error("%s: %s", request.url.path, error)  # it may name the database
            return PlainTextResponse(
                "the fleet cannot do this now; its log says why\n", 503, {"retry-after": "10"}
            )
        return Response(encode_json(to_plain(answer)), media_type="application/json")

    def _carry_out(
        self, address: str, data: bytes, kind: type[Body], carry_out: Callable[[Body], Enrolment]
    ) -> Enrolment:
        limits = {f"enrolment address {find_network(address)}": failure_limit.MAX_FAILURES}
        with self._store.snapshot() as session:
            is_allowed = failure_limit.allows(session, limits, time.time())
        too_many = failure_limit.too_many("failures")
        try:
            request = from_plain(kind, json.loads(data), "request", SignatureError)
            if not is_allowed:  # others of a shared address have failed
                with self._store.snapshot() as session:
                    if not enrolment.is_expected(session, request):
                        raise too_many
            return carry_out(request)
        except (ValueError, RecursionError, SignatureError) as error:
            if not is_allowed:
                raise too_many from error
            with self._store.transaction() as session:
                failure_limit.take(session, limits, time.time())
            if isinstance(error, SignatureError):
                raise
            raise RequestError(400, "the request is not JSON") from error

    def _enrol(self, request: EnrolmentRequest) -> Enrolment:
        with self._store.transaction() as session:
            device, certificate = enrolment.enrol(
                session, self._authority, request, self._settings.certificate_life_s
            )
            _count_certificate(session, device.name)
        return self._describe(device, certificate)

    def _renew(self, request: RenewalRequest) -> Enrolment:
        with self._store.transaction() as session:
            device, certificate = enrolment.renew(
                session, self._authority, request, self._settings.certificate_life_s
            )
            _count_certificate(session, device.name)
        return self._describe(device, certificate)

    def _describe(self, device: DeviceRow, certificate: SignedCertificate) -> Enrolment:
        web = f"https://{self._settings.web_address}"
        return Enrolment(
            device=device.name,
            certificate=certificate.pem,
            authority=self._authority.certificate_path.read_text(),
            brokers=self._settings.broker_addresses,
            web=web,
            artifacts=self._settings.artifacts,
            tuf_root=read_newest_root(self._folder.repository),
            package_keys=tuple(
                PackageKey(name=path.name.removesuffix(PUBLIC_KEY_SUFFIX), public_key=path.read_text())
                for path in list_keys(find_keys_folder())
            ),
            target=device.target,
        )


def _count_certificate(session: Session, device: str) -> None:
    """Count a certificate, because each one adds a permanent entry to the audit log.

    Raises:
        RequestError: 429 if the device got 20 certificates in a minute.
    """
    if not failure_limit.take(
        session, {f"certificates of {device}": failure_limit.MAX_FAILURES}, time.time()
    ):
        raise failure_limit.too_many("certificates")


def make_app(
    store: Store,
    folder: FleetFolder,
    settings: FleetSettings,
    authority: Authority,
    upload_limits: UploadLimits | None = None,
) -> Starlette:
    pages = EnrolmentPages(store, folder, settings, authority)
    uploads = SampleUploads(store, SampleVault(folder, settings), upload_limits or UploadLimits())
    for name in ("metadata", "targets"):
        make_folders(folder.repository / name)
    app = Starlette(
        routes=[
            Route("/authority", pages.show_authority, methods=["GET"]),
            Route("/enrol", pages.enrol, methods=["POST"]),
            Route("/renew", pages.renew, methods=["POST"]),
            Route("/samples/{id}", uploads.answer, methods=["HEAD", "PUT"]),
            Mount("/artifacts/metadata", _Artifacts(directory=folder.repository / "metadata")),
            Mount("/artifacts/targets", _Artifacts(directory=folder.repository / "targets")),
        ]
    )
    app.router.redirect_slashes = False  # it would send clients to whatever host the request names
    return app
