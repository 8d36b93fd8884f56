"""One service of the model `linear` for the tests of a file, and models that hang."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker, maker, other_signer
from tests.service.gates import Gate, Gated
from tests.service.service_parts import Running, running_linear

from edgekit_runtime.service import loading

__all__ = ["maker", "other_signer"]


@pytest.fixture(scope="module")
def linear(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_linear(maker, tmp_path_factory.mktemp("s")) as service:
        yield service


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stands before every session that is opened from now on."""
    opened, made = loading.open_preferred, Gate()

    def open_gated(*args: Any) -> Any:
        variant, session = opened(*args)
        made.sessions.append(Gated(session))
        return variant, made.sessions[-1]

    monkeypatch.setattr(loading, "open_preferred", open_gated)
    yield made
    made.open()
