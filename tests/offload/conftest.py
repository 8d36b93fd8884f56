"""What all tests of offload start from."""

from tests.toolkit.conftest import short_measurements as short_measurements  # a fixture
