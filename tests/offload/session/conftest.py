"""Packages, as the tests of the runtime make them."""

from tests.runtime.conftest import maker, other_signer

__all__ = ["maker", "other_signer"]
