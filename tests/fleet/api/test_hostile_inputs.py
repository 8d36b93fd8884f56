"""Hostile requests to every endpoint; `scripts/fuzz-api` sends many more."""

import asyncio

from tests.fleet.api.conftest import Api
from tests.fleet.api.hostile import attack

from edgekit_fleet.api.endpoints.table import ENDPOINTS


def test_no_hostile_input_leads_to_500(api: Api):
    found = asyncio.run(attack(api, seed=14, count=20))
    assert len(found) == len(ENDPOINTS)
    statuses = {status for counts in found.values() for status in counts}
    assert {200, 201, 400, 401, 404, 409, 415, 422} <= statuses  # it gets past the first check
