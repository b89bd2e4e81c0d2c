"""The queueing model behind docs/internals/scale.md agrees with hand calculations and with the code's constants."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from bench.measure import fleet_model as model
from bench.measure.fleet_model import Costs, Site, simulate
from headway.ledger.fleet import share
from headway.run.fleet import slot
from headway.run.pool import gate, outcomes, runner

#: Everything but what a test makes scarce.
FREE = Costs(
    statement=1e-9, item=1e-9, item_client=1e-9, statement_client=0.0, item_wal=0.0, group_wal=0.0, claim_wal=0.0,
    background=1.0, background_wal=0.0,
)  # fmt: skip
PLENTY = Site(cores=1000, flush=0.0, wal_rate=1e12, trip=0.0)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(("workers", "item", "items"), [(1, 0.02, 1), (3, 0.02, 500), (8, 0.0, 20_000), (5, 1.0, 20)])
def test_every_item_is_claimed_once_and_recorded_once(workers: int, item: float, items: int, cold: bool):
    found = simulate(workers, item, items=items, seconds=1000.0, cold=cold)
    assert (found.claimed, found.recorded, found.left) == (items, items, 0)


def test_items_without_an_outcome_at_the_end_are_claimed_or_untried():
    found = simulate(50, 0.02, items=100_000, seconds=3.0)
    assert found.claimed + found.left == 100_000
    assert 0 < found.recorded <= found.claimed


def test_a_seed_says_the_same_twice():
    assert simulate(20, 0.02, seconds=3.0, seed=5) == simulate(20, 0.02, seconds=3.0, seed=5)


@pytest.mark.parametrize("item", [0.001, 0.02, 0.5])
def test_with_plenty_of_everything_it_is_the_ideal_rate(item: float):
    found = simulate(40, item, costs=FREE, site=PLENTY, seconds=20.0)
    assert found.rate == pytest.approx(40 / item, rel=0.06)  # what is under way at the end is not recorded


def test_where_the_servers_processors_are_scarce_they_bound_the_rate():
    costs = replace(FREE, item=0.001)
    found = simulate(40, 0.001, costs=costs, site=replace(PLENTY, cores=4), seconds=10.0)
    assert found.rate == pytest.approx(4 / 0.001, rel=0.1)
    assert found.tightest == "processors"


def test_where_the_log_is_scarce_its_bytes_bound_the_rate():
    found = simulate(40, 0.001, costs=replace(FREE, item_wal=1000.0), site=replace(PLENTY, wal_rate=5e6), seconds=10.0)
    assert found.rate == pytest.approx(5e6 / 1000, rel=0.1)
    assert found.tightest == "wal"


def test_where_the_jobs_row_is_scarce_blocks_grow_until_it_is_not():
    """Eleven round trips of 2 ms: 45 claims a second at most, and 400 slots with blocks of 2 s want 200."""
    site = replace(PLENTY, trip=0.002)
    fixed = simulate(400, 0.02, costs=FREE, site=site, seconds=20.0, claim_times=0.0)
    assert fixed.busy["row"] > 0.95
    assert fixed.claims / 20 == pytest.approx(1 / (11 * 0.002), rel=0.1)
    growing = simulate(400, 0.02, costs=FREE, site=site, seconds=20.0)
    assert growing.rate > 1.5 * fixed.rate


def test_the_model_works_by_the_constants_of_the_code():
    constants: dict[ModuleType, tuple[str, ...]] = {
        runner: ("COMMIT_PAUSE",),
        outcomes: ("COMMIT_MOST",),
        gate: ("BATCH_SECONDS", "BATCH_MOST"),
        slot: ("BLOCK_SECONDS", "BLOCK_SECONDS_MOST", "CLAIM_TIMES", "COMMIT_SECONDS"),
    }
    for module, names in constants.items():
        for name in names:
            assert getattr(model, name) == getattr(module, name)
    assert model.BLOCK_MOST == share.BLOCK_MOST
