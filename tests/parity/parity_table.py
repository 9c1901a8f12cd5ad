"""docs/parity.md from a run of all cases.

PYTHONPATH=tests/support python tests/parity/parity_table.py        # runs both systems and writes the file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from local_stack import ROOT
from parity_answers import RESPECTS, TOLERANCE
from parity_cases import CHUNK, PARAMETERS, SHAPES, Case
from parity_run import NUM_AT_ONCE, Comparison, compare, running_systems

TABLE = ROOT / "docs" / "parity.md"


def render(comparisons: Sequence[Comparison]) -> str:
    num_equal = sum(not comparison.differences for comparison in comparisons)
    lines = [
        "# Parity of the disaggregated and the aggregated system",
        "",
        f"{num_equal} of {len(comparisons)} cases are answered alike by `pagewire up` (prefill and decode apart, KV moved between",
        "them) and by `pagewire up --aggregated` (one worker does both): the same token ids, text, finish and stop reasons, and",
        f"usage, cached tokens included; log-probabilities within {TOLERANCE:g} (fp32, CPU, SmolLM2-135M-Instruct). Greedy or seeded;",
        f"{NUM_AT_ONCE} requests at a time, so that each shares its batches with others; every parameter set meets a cold, a warm and",
        f"a half warm cache, streamed and not. A step has {CHUNK} tokens, so long prompts are computed in chunks. \"Under pressure\" is",
        "everything at once on too few blocks: requests are preempted and resumed. Random draws are over the whole vocabulary",
        "where the parameters name no filter.",
        "",
        "Made by `tests/parity/parity_table.py`; `make long-test` runs the cases and holds this file to what it finds,",
        "`make test` runs a part.",
        "",
        "| parameters | cases | " + " | ".join(RESPECTS) + " |",
        "| --- |" + " --- |" * (len(RESPECTS) + 1),
    ]  # fmt: skip
    for name in PARAMETERS:
        lines.append(_row(name, [comparison for comparison in comparisons if comparison.case.parameters == name]))
    lines += ["", "| the same cases by | cases | equal |", "| --- | --- | --- |"]
    groups: dict[str, Callable[[Case], bool]] = {
        **{f"prompt: {shape}": lambda case, shape=shape: case.shape == shape for shape in SHAPES},  # type: ignore[misc]
        "streamed": lambda case: case.is_streamed,
        "whole": lambda case: not case.is_streamed,
        "cold cache": lambda case: case.cache_state == "cold",
        "warm cache": lambda case: case.cache_state == "warm",
        "half warm cache": lambda case: case.cache_state == "half warm",
        "under pressure": lambda case: case.is_under_pressure,
    }
    for name, belongs in groups.items():
        group = [comparison for comparison in comparisons if belongs(comparison.case)]
        lines.append(f"| {name} | {len(group)} | {sum(not comparison.differences for comparison in group)} |")
    return "\n".join(lines) + "\n"


def _row(name: str, group: Sequence[Comparison]) -> str:
    counts = [sum(respect not in comparison.differences for comparison in group) for respect in RESPECTS]
    return f"| {name} | {len(group)} | " + " | ".join("all" if count == len(group) else str(count) for count in counts) + " |"


if __name__ == "__main__":
    with running_systems() as systems:
        TABLE.write_text(render(compare(systems)))
