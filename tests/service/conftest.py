"""One service of the model `linear` for the tests of a file."""

from collections.abc import Iterator

import pytest
from tests.runtime.conftest import PackageMaker, maker, other_signer
from tests.service.service_parts import Running, running_linear

__all__ = ["maker", "other_signer"]


@pytest.fixture(scope="module")
def linear(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_linear(maker, tmp_path_factory.mktemp("s")) as service:
        yield service
