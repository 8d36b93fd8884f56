"""`POST /v2/models/NAME/answer`: takes an image or sound as the body, returns the task's answer as JSON."""

import functools
import json

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import RequestError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.infer_request import take_sequence
from edgekit_runtime.service.answers.answer_path import Answered, AnswerPath, AnswerRequest
from edgekit_runtime.service.api.inference import WhenLoaded
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.response import make_json
from edgekit_runtime.service.models.catalogue import Catalogue, EvictedError


class AnswerHandler:
    __slots__ = ("_answers", "_models", "_when_loaded")

    def __init__(self, models: Catalogue, when_loaded: WhenLoaded, answers: AnswerPath) -> None:
        self._models, self._when_loaded, self._answers = models, when_loaded, answers

    def handle_request(
        self, name: str, version: str | None, connection: Connection, head: RequestHead, body: memoryview
    ) -> None:
        """Handle a request with an image or sound. The response is sent later.

        `body` must stay valid until the response is sent.

        Raises:
            EdgekitError: The error to respond with.
        """

        def reply(answered: Answered | BaseException) -> None:
            if isinstance(answered, BaseException):
                connection.respond_error(answered)
            else:
                connection.respond(*make_json({"model_name": name, **answered.to_json()}))

        options = parse_overrides(head.query)
        names = ("sequence_id", "sequence_start", "sequence_end")
        sequence = take_sequence({name: options.pop(name) for name in names if name in options})
        request = AnswerRequest(
            find=functools.partial(self._models.find, name, version),
            data=body,
            media_type=MediaType.parse(head.content_type),
            overrides=options,
            sequence=sequence,
            reply=reply,
            is_unwanted=lambda: connection.has_left,
        )
        try:
            self._answers.submit(request)
        except EvictedError:
            again = functools.partial(self.handle_request, name, version, connection, head, body)
            self._when_loaded(name, connection, again)


def parse_overrides(query: str) -> dict[str, JsonValue]:
    """Parse task options from a URL query such as `min_score=0.5&top=3`. Values are JSON or plain text.

    Raises:
        RequestError: The query is not a list of NAME=VALUE pairs.
    """
    overrides: dict[str, JsonValue] = {}
    for part in filter(None, query.split("&")):
        name, separator, value = part.partition("=")
        if not separator or not name.isidentifier():
            raise RequestError(
                400, f"the query holds {part[:40]!r}, expected NAME=VALUE of the task's options"
            )
        try:
            overrides[name] = json.loads(value)
        except (ValueError, RecursionError):
            overrides[name] = value
    return overrides
