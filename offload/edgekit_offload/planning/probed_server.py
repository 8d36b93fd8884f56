"""Measures a server with a known URL: its time for the whole model, and the link to it.

Single kernels cannot be measured on such a server. Instead, the kernel times of this machine are scaled to
the total time of the server. This is only a model, because the ratios between kernel times differ from
processor to processor.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from edgekit_offload.partition.opened_model import Feeds
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_runtime.client.client import Client
from edgekit_runtime.errors import CutError, RequestError
from edgekit_runtime.offload.measurement.link_probe import LinkProbe, probe_link
from edgekit_runtime.offload.offload_options import read_token

_URL: Final = re.compile(r"https?:.*")
_NO_ACCESS: Final = (401, 403)
_WARMUP: Final = 3
_LEAST_RUNS: Final = 5
_LEAST_SHARE: Final = 0.05  # share of a request that counts as work of the server at least


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    url: str
    token_file: Path | None = None
    ca_file: str | None = None
    insecure: bool = False

    def read_arguments(self) -> dict[str, Any]:
        """Return the arguments `token`, `ca_file` and `insecure` for clients of the server.

        Raises:
            ConfigError: The token cannot be read.
        """
        token = None if self.token_file is None else read_token(self.token_file)
        return {"token": token, "ca_file": self.ca_file, "insecure": self.insecure}


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """The measurements of a server over its link.

    Attributes:
        profile: The profile of this machine, scaled to the server's time for the whole model.
    """

    profile: ModelProfile
    link: LinkProbe
    note: str


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def check_server(access: ServerAccess, name: str) -> None:
    """Check that the server serves a model, with a request for its metadata.

    Raises:
        CutError: The server does not serve the model.
        TransportError: The server cannot be reached.
        ConfigError: The token cannot be read, or the server on another machine uses plain HTTP.
    """
    with Client(access.url, **access.read_arguments()) as client, _explain_refusals(access.url, name):
        client.metadata(name)


def probe_server(access: ServerAccess, profile: ModelProfile, feeds: Feeds, seconds: float) -> ProbedServer:
    """Measure the link to a server, and the server's time for the whole model.

    `profile` is the model's profile on this machine. `feeds` are the inputs of the request that is measured.
    `seconds` is the measuring time.

    Raises:
        CutError: The server does not serve the model.
        TransportError: The server cannot be reached.
        ConfigError: The token cannot be read, or the server on another machine uses plain HTTP.
    """
    url, arguments = access.url, access.read_arguments()
    link = probe_link(url, **arguments)
    with Client(url, **arguments) as client, _explain_refusals(url, profile.model):
        request_s, output_bytes = _time_requests(client, profile.model, feeds, seconds)
    state = link.state
    sent_s = 8 * sum(tensor.nbytes for tensor in feeds.values()) / state.up_bits_per_s
    link_s = link.rtt_s + sent_s + 8 * output_bytes / state.down_bits_per_s
    whole_s = max(request_s - link_s, _LEAST_SHARE * request_s)
    ratio = whole_s / profile.whole_s
    kernels = tuple(replace(kernel, seconds=kernel.seconds * ratio) for kernel in profile.kernels)
    machine = replace(profile.machine, cpu=f"the server at {url}", quota=None)
    note = (
        f"{url}: a request took {request_s * 1e3:.3g} ms there, of which {whole_s * 1e3:.3g} ms are left for"
        f" the model; its kernels are those of this machine times {ratio:.3g} (modelled). The link has"
        f" {state.up_bits_per_s / 1e6:.3g} Mbit/s up and a round trip of {link.rtt_s * 1e3:.3g} ms, which is"
        " a setting of the table."
    )
    scaled = replace(profile, measured_on=url, machine=machine, whole_s=whole_s, kernels=kernels)
    return ProbedServer(scaled, link, note)


@contextlib.contextmanager
def _explain_refusals(url: str, name: str) -> Iterator[None]:
    try:
        yield
    except RequestError as cause:
        advice = "serve the whole model there under this name, or pass a profile as --server"
        if cause.status in _NO_ACCESS:
            advice = "give its token by --token-file"
        raise CutError(f"{url}: does not answer for the model '{name}': {cause}; {advice}") from cause


def _time_requests(client: Client, name: str, feeds: Feeds, seconds: float) -> tuple[float, int]:
    times: list[float] = []
    output_bytes = 0
    begin_s = time.monotonic()
    while len(times) < _WARMUP + _LEAST_RUNS or time.monotonic() - begin_s < seconds / 2:
        run_s = time.perf_counter()
        outputs = client.infer(name, dict(feeds))
        times.append(time.perf_counter() - run_s)
        output_bytes = sum(output.nbytes for output in outputs.values())
    return median(times[_WARMUP:]), output_bytes
