"""`pagewire chaos --simulated N`: runs of the simulated cluster, one seed after the other, until N faults have been made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.chaos.chaos_event import ChaosEvent
from services.chaos.simulated_cluster import NUM_TRANSFERS, Simulation


def run_simulated(num_faults: int, seed: int) -> Iterator[ChaosEvent]:
    """Run `i` has the seed `seed + i`, so that each can be seen again by itself. The last event is "done"."""
    made: Counter[str] = Counter()
    num_runs = num_committed = num_violations = 0
    while made.total() < num_faults:
        run_seed = seed + num_runs
        simulation = Simulation.drawn(run_seed)
        for violation in simulation.run():
            num_violations += 1
            yield {"event": "violation", "what": violation, "seed": run_seed, "again": f"pagewire chaos --simulated 1 --seed {run_seed}"}
        num_runs += 1
        made.update(simulation.num_faults)
        num_committed += simulation.num_committed
        yield {"event": "progress", "num_faults": made.total()}
    yield {
        "event": "done",
        "is_ok": num_violations == 0,
        "seed": seed,
        "num_faults": made.total(),
        "faults": dict(sorted(made.items())),
        "num_runs": num_runs,
        "num_transfers": num_runs * NUM_TRANSFERS,
        "num_committed": num_committed,
        "num_violations": num_violations,
    }
