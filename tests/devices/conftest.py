"""The device that a test runs on beside the CPU."""

import pytest

from tests.devices.common import PRETENDED, REAL


@pytest.fixture(
    params=[
        pytest.param(PRETENDED, id="pretended"),
        pytest.param(REAL, id="cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """The pretended device, and with ``-m gpu`` a real one."""
    return request.param
