"""KV transfer under seeded faults on the in-memory twin (services/chaos/simulated_cluster.py says what must hold in every run)."""

import random
from dataclasses import replace

import pytest

from services.chaos import simulated_cluster
from services.chaos.simulated_cluster import NUM_TRANSFERS, Disturbances, Simulation
from services.chaos.simulated_run import run_simulated
from shared.transport.host_blocks import HostBlocks
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.simulated_network import BytesMemory, FaultPlan

PLANS = {
    "calm": FaultPlan(),
    "reordered": FaultPlan(min_delay_s=0.0001, max_delay_s=0.05),
    "duplicated": FaultPlan(data_duplicate=0.4, control_duplicate=0.4, max_delay_s=0.02),
    "late": FaultPlan(data_late=0.1, max_delay_s=0.001),
    "lossy data": FaultPlan(data_loss=0.1, max_delay_s=0.001),
    "flipped": FaultPlan(data_flip=0.1, control_flip=0.05, max_delay_s=0.001),
    "lossy control": FaultPlan(control_loss=0.2, max_delay_s=0.001),
    "slow": FaultPlan(lane_bytes_per_s=20_000.0, max_delay_s=0.001),
    "everything": FaultPlan(0.05, 0.1, 0.05, 0.05, 0.1, 0.05, 0.0001, 0.1, False, 1e6, 0.05),
}
DISTURBANCES = [
    Disturbances(),
    Disturbances(abort_share=0.4),
    Disturbances(num_deaths=2),
    Disturbances(num_deaths=2, has_restarts=True),
    Disturbances(num_stops=2, max_stop_s=4.0),
]


@pytest.mark.parametrize("name", PLANS)
def test_every_transfer_is_exact_or_fails_in_time(name):
    committed = 0
    for seed in range(30):
        simulation = Simulation(seed, PLANS[name], DISTURBANCES[seed % len(DISTURBANCES)])
        assert simulation.run() == [], f"plan {name!r}, seed {seed}"
        committed += simulation.num_committed
    assert committed > 0


@pytest.mark.parametrize("name", ["calm", "duplicated", "slow"])
def test_faults_that_lose_nothing_fail_nothing(name):
    for seed in range(15):
        simulation = Simulation(seed, PLANS[name])
        assert simulation.run() == [] and simulation.num_committed + simulation.num_refused == NUM_TRANSFERS, f"plan {name!r}, seed {seed}"


def test_process_that_stood_still_for_a_moment_is_not_given_up():
    for seed in range(15):
        simulation = Simulation(seed, FaultPlan(is_control_ordered=True), Disturbances(num_stops=3))
        assert simulation.run() == [] and simulation.num_committed + simulation.num_refused == NUM_TRANSFERS, f"seed {seed}"


def test_one_loss_in_a_hundred_is_repaired():
    for seed in range(15):
        simulation = Simulation(seed, FaultPlan(data_loss=0.01))
        assert simulation.run() == [] and simulation.num_committed + simulation.num_refused == NUM_TRANSFERS, f"seed {seed}"


def test_five_hundred_drawn_faults_break_nothing():
    *_, done = run_simulated(500, seed=1)
    assert done["is_ok"], done
    assert set(done["faults"]) == {"loss", "duplicate", "flip", "late", "abort", "kill", "restart", "stop"}
    assert done["num_faults"] >= 500


@pytest.mark.long
def test_twenty_thousand_drawn_faults_break_nothing():
    violations = [event for event in run_simulated(20_000, seed=1) if event["event"] == "violation"]
    assert not violations


def test_run_is_the_same_each_time_its_seed_is_given():
    first, again = Simulation.drawn(6), Simulation.drawn(6)
    assert first.run() == again.run()
    assert first.num_faults == again.num_faults != Simulation.drawn(7).num_faults


def _wrong_blocks(monkeypatch):
    """Now and then another block is written, or read, than was meant."""
    draw = random.Random(0)

    def misdirected(regions):
        return [replace(region, block_id=region.block_id ^ 1) if draw.random() < 0.03 else region for region in regions]

    read, write = HostBlocks.read, HostBlocks.write
    monkeypatch.setattr(BytesMemory, "read", lambda self, regions: read(self, misdirected(regions)))
    monkeypatch.setattr(BytesMemory, "write", lambda self, regions, data: write(self, misdirected(regions), data))


def _deaf_to_death(monkeypatch):
    monkeypatch.setattr(simulated_cluster, "SETTINGS", simulated_cluster.SETTINGS.model_copy(update={"kv_peer_timeout_s": 8.0}))


def _impatient(monkeypatch):
    monkeypatch.setattr(simulated_cluster, "SETTINGS", simulated_cluster.SETTINGS.model_copy(update={"kv_peer_timeout_s": 0.3}))


def _ends_unheard(monkeypatch):
    draw, right = random.Random(0), ReceiverState.deliver_events

    def deliver_events(self):
        if draw.random() < 0.99:
            right(self)
        else:
            self._outbox.clear()

    monkeypatch.setattr(ReceiverState, "deliver_events", deliver_events)


@pytest.mark.parametrize(
    "fault, symptom",
    [
        (_wrong_blocks, "is not what was sent"),
        (_wrong_blocks, "was written while it was free"),
        (_deaf_to_death, "outlived"),
        (_impatient, "failed though everyone lived"),
        (_ends_unheard, "never ended"),
    ],
)
def test_simulation_sees_what_would_be_wrong(monkeypatch, fault, symptom):
    fault(monkeypatch)
    assert any(symptom in violation for seed in range(60) for violation in Simulation.drawn(seed).run())
