"""What a chaos run says while it runs, and how it is shown: one JSON object a line, or a progress bar and a summary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ChaosEvent = dict[str, Any]
"""`event` is "stage", "progress" or "fault" (both with num_faults so far), "violation" (what, seed, again) or, last of
all, "done" (is_ok and the figures)."""


def show(events: Iterable[ChaosEvent], num_faults: int, as_json: bool) -> bool:
    """Show the events as they come; True when no check failed."""
    is_ok = False
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("faults"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal) as progress:
        task = progress.add_task("chaos", total=num_faults)
        for event in events:
            kind = event["event"]
            if kind == "done":
                is_ok = bool(event["is_ok"])
            if as_json:
                print(json.dumps(event), flush=True)
            elif kind in ("progress", "fault"):
                progress.update(task, completed=event["num_faults"])
            elif kind == "stage":
                console.print(event["what"], markup=False)
            elif kind == "violation":
                console.print(f"[red]FAILED[/] {event['what']}\n       to see it again: {event['again']}")
            else:
                _summarize(console, event)
    return is_ok


def _summarize(console: Console, done: ChaosEvent) -> None:
    console.print("[green]no check failed[/]" if done["is_ok"] else "[red]checks failed[/]")
    for name, value in done.items():
        if name not in ("event", "is_ok"):
            shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            console.print(f"  {name.removeprefix('num_').replace('_', ' ')}: {shown}", markup=False)
