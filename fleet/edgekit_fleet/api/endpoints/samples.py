"""Endpoints of samples from the field."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import DEFAULT_LIMIT, Fleet, Named, Nothing, PageLimit, endpoint
from edgekit_fleet.operations import samples
from edgekit_fleet.operations.samples import (
    SampleChoice,
    SampleOrderStatus,
    SampleStatus,
    SampleSummary,
    StartSamples,
)
from edgekit_fleet.samples.vault import SampleVault
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.protocol.samples import SampleTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchSamples:
    """Whether devices may send samples. Omitted fields are not changed.

    Attributes:
        days: The number of days for which samples are stored, initially 90.
        max_bytes: The maximum total size of the samples, initially 20 GiB.
    """

    is_on: bool
    days: Annotated[float | None, Range(0.01, 3650)] = None
    max_bytes: Annotated[int | None, Range(1, 1 << 50)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSamples:
    """Which samples to list. An empty field matches all samples.

    Attributes:
        trigger: The kind of trigger that selected the sample.
        limit: The maximum number of samples on the page.
        after: The value of `next` of the previous page.
    """

    model: str = ""
    device: str = ""
    version: str = ""
    order: str = ""
    trigger: str = ""
    limit: PageLimit = DEFAULT_LIMIT
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    """A page of samples, newest first.

    Attributes:
        items: The samples.
        next: The value of `after` for the next page, or null on the last page.
    """

    items: tuple[SampleSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSample:
    """A sample with its content.

    Attributes:
        summary: The entry of the sample in a list.
        tensors: The tensors whose values are concatenated in `content`. Empty for a media file.
        content: The input as it was received, in base64.
        answer: The answer of the model.
    """

    summary: SampleSummary
    tensors: tuple[SampleTensor, ...]
    content: str
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedSamples:
    """The number of deleted samples."""

    count: int


def open_vault(fleet: Fleet) -> SampleVault:
    return SampleVault(fleet.folder, fleet.settings)


@endpoint("GET", "/samples/status", scope="read", summary="Return orders and counts of samples.")
def get_sample_status(fleet: Fleet, _principal: Principal, _request: Nothing) -> SampleStatus:
    return samples.read_status(fleet.store)


@endpoint(
    "POST", "/samples/setting", scope="admin", summary="Let the fleet collect samples from the field, or not."
)
def switch_samples(fleet: Fleet, principal: Principal, request: SwitchSamples) -> SampleStatus:
    samples.switch(
        fleet.store,
        open_vault(fleet),
        is_on=request.is_on,
        days=request.days,
        max_bytes=request.max_bytes,
        actor=principal.name,
    )
    return samples.read_status(fleet.store)


@endpoint(
    "POST", "/samples/orders", scope="sample", summary="Order samples of a model from devices.", status=201
)
def start_samples(fleet: Fleet, principal: Principal, request: StartSamples) -> SampleOrderStatus:
    return samples.start(fleet.store, request, actor=principal.name)


@endpoint("POST", "/samples/orders/{name}/stop", scope="sample", summary="End an order of samples.")
def stop_samples(fleet: Fleet, principal: Principal, request: Named) -> SampleOrderStatus:
    return samples.stop(fleet.store, request.name, actor=principal.name)


@endpoint("GET", "/samples", scope="sample", summary="List samples, without what they hold.")
def list_samples(fleet: Fleet, _principal: Principal, request: ListSamples) -> SampleList:
    choice = SampleChoice(
        model=request.model,
        device=request.device,
        version=request.version,
        order=request.order,
        trigger=request.trigger,
    )
    with fleet.store.snapshot() as session:
        items, following = samples.page_samples(session, choice, after=request.after, limit=request.limit)
    return SampleList(items=tuple(items), next=following)


@endpoint(
    "GET", "/samples/{name}", scope="sample", summary="Return a sample; the audit log says who read it."
)
def get_sample(fleet: Fleet, principal: Principal, request: Named) -> OpenedSample:
    summary, sample = samples.read(fleet.store, open_vault(fleet), request.name, actor=principal.name)
    return OpenedSample(
        summary=summary,
        tensors=sample.header.tensors,
        content=base64.b64encode(sample.input).decode("ascii"),
        answer=sample.answer,
    )


@endpoint("POST", "/samples/delete", scope="sample", summary="Delete the samples that all fields mean.")
def delete_samples(fleet: Fleet, principal: Principal, request: SampleChoice) -> DeletedSamples:
    count = samples.delete(fleet.store, open_vault(fleet), request, actor=principal.name)
    return DeletedSamples(count=count)
