"""Sequences of silero-vad: what keeping states adds, and whether 200 at once are answered right.

    scripts/python benchmarks/service_sequences.py [--seconds 10] [--sequences 200] [--steps 30]

The model is `silero_vad.onnx` of the wheel silero-vad with `--fix sr=16000 --state stateN=state`, float32.

- Added latency: client and server share one core; blocks of prepared requests take turns with bare runs in
  this process. "states sent" asks the same model without sequences: each request holds the states, each
  response the next ones.
- Right answers: one request of each sequence is under way at a time, on a connection of its own. Answers are
  compared with a bare session that runs one sequence after the other, in two settings: without batches, and
  with batches of up to 16, for which engines choose other kernels.

Every figure is of this machine and this run: compare ratios.
"""

import json
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.package.states import StateInputs
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.passes.optimiser import optimise
from public_models import SILERO_VAD, MissingError, PublicModel
from results import make_parser
from service_latency import HOST, compare, pin, take_turns
from serving import Service, serving, write_signed

CHUNK = 576  # samples: 512 and 64 of the chunk before
SILERO = PublicModel("silero_vad", SILERO_VAD, "silero_vad/data/silero_vad.onnx")
BATCHED = """
[models.vad.scheduling]
max_batch = {batch}
max_waiting = 1024
"""


class Model:
    """The model with its states, and a session of it in this process."""

    def __init__(self, folder: Path) -> None:
        """Write its packages: `vad` with states, `plain` without."""
        source = load_model(SILERO.path(), {"sr": 16000}, {"stateN": "state"})
        assert isinstance(source.model, OnnxModel)
        states = StateInputs(source.states, source.inputs)
        feeds = states.complete({"input": draw(1, 0)[0][None]})
        content = optimise(source.model.proto, batch=None, feeds=[feeds]).model.SerializeToString()
        sign = load_signer(folder=folder / "keys")
        self.packages = (
            write_signed(folder, "vad", content, feeds, sign, states=source.states),
            write_signed(folder, "plain", content, feeds, sign),
        )
        self.states, self.session = states, OrtSession(content, OrtOptions(threads=1))

    def run(self, chunks: NDArray[np.float32]) -> list[float]:
        """Return the answers to the chunks of one sequence."""
        stored, answers = None, []
        for chunk in chunks:
            outputs = self.session.run(self.states.complete({"input": chunk[None]}, stored))
            stored = self.states.take(outputs)
            answers.append(float(outputs["output"][0, 0]))
        return answers


def draw(steps: int, seed: int) -> NDArray[np.float32]:
    """Return chunks [steps, 576] of noise whose loudness changes."""
    random = np.random.default_rng(seed)
    loudness = 10 ** random.uniform(-4, 0, (steps, 1))
    return np.clip(random.normal(0, loudness, (steps, CHUNK)), -1, 1).astype(np.float32)


def make_request(chunk: NDArray[np.float32], sequence: SequenceStep | None, **states: Any) -> bytes:
    """Return a request to `vad`, or to `plain` where states are sent."""
    inputs = {"input": chunk[None], **states}
    options = InferOptions("plain" if states else "vad", None, 0, None, sequence)
    start = make_template(options, inputs, [None] * len(inputs), (), HOST).start
    return start + b"".join(array.tobytes() for array in inputs.values())


def connect(stack: ExitStack, service: Service) -> socket.socket:
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.connect(service.path)
    return client


def receive(client: socket.socket) -> memoryview:
    """Return the body of an answer with binary data."""
    data = client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(data.decode(errors="replace"))
    size = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split()[1])
    while len(body) < size:
        body += client.recv(65536)
    return memoryview(body)


def measure_added(service: Service, model: Model, seconds: float, sequences: int) -> dict[str, Any]:
    chunk = draw(1, 1)[0]
    feeds = model.states.complete({"input": chunk[None]})
    with ExitStack() as stack:
        client = connect(stack, service)

        def send(request: bytes) -> None:
            client.sendall(request)
            receive(client)

        for number in range(1, sequences + 1):
            send(make_request(chunk, SequenceStep(number, start=True)))
        requests = [make_request(chunk, SequenceStep(number)) for number in range(1, sequences + 1)]
        sent = make_request(chunk, None, state=feeds["state"])
        alone = make_request(chunk, None)
        turn = iter(range(1 << 60))
        pin(service.pid)
        ways = {
            "bare": lambda: model.session.run(feeds),
            "states sent": lambda: send(sent),
            "without a sequence": lambda: send(alone),
            "one sequence": lambda: send(requests[0]),
            f"{sequences} sequences in turn": lambda: send(requests[next(turn) % sequences]),
        }
        return compare(take_turns(ways, seconds))


def measure_answers(service: Service, model: Model, sequences: int, steps: int) -> dict[str, Any]:
    """Send a request of each sequence, then read all answers, and so on."""
    chunks = [draw(steps, number) for number in range(sequences)]
    expected = np.array([model.run(sequence) for sequence in chunks])
    answers = np.zeros((sequences, steps))
    with ExitStack() as stack:
        clients = [connect(stack, service) for _ in range(sequences)]
        begin = time.perf_counter()
        for index in range(steps):
            for number, client in enumerate(clients):
                step = SequenceStep(number + 1, start=index == 0, end=index == steps - 1)
                client.sendall(make_request(chunks[number][index], step))
            for number, client in enumerate(clients):
                answers[number, index] = np.frombuffer(receive(client)[-4:], np.float32)[0]
        seconds = time.perf_counter() - begin
    return {
        "answers": answers.size,
        "equal": int((answers == expected).sum()),
        "largest difference": float(np.abs(answers - expected).max()),
        "range of answers": [round(float(expected.min()), 4), round(float(expected.max()), 4)],
        "steps a second": round(answers.size / seconds),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the comparison")
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = Model(folder)
        except MissingError as error:
            sys.exit(str(error))
        figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        for batch in (1, 16):
            with serving(folder, *model.packages, config=BATCHED.format(batch=batch)) as service:
                figures[f"max_batch {batch}"] = measure_answers(
                    service, model, arguments.sequences, arguments.steps
                )
        with serving(folder, *model.packages) as service:
            figures["added_us"] = measure_added(service, model, arguments.seconds, arguments.sequences)
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
