"""The whole system on one machine: Redis, prefill and decode workers and the router, each its own process, watched and restarted."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from services.local.child import Child
from services.local.placement import Place, WorkerGroup, place_workers
from services.local.ports import check_port, free_port
from services.local.redis_server import check_reachable, server_command
from shared.available_cpus import available_cpus
from shared.available_memory import available_memory_bytes
from shared.config import CPU_KV_CACHE_GIB, Role, Settings, load_settings
from shared.errors import ConfigurationError
from shared.model_files.model_source import ModelSource, resolve_model
from shared.nvidia_driver import count_gpus, may_use_gpu
from shared.worker.process import on_termination

_API_KEYS = "PAGEWIRE_API_KEYS"
READY_TIMEOUT_S = 600.0
WATCH_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 3.0
"""Services get this long to end after SIGTERM; with Redis after them the whole stop stays below 5 s."""


@dataclass(frozen=True)
class StackPlan:
    settings: Settings
    num_prefill: int
    """0 in aggregated mode."""
    num_decode: int
    redis_url: str | None
    """None: start one."""
    is_json: bool


class Stack:
    def __init__(self, plan: StackPlan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._stopping = threading.Event()
        self._redis: Child | None = None
        self._services: list[Child] = []  # the router last
        self._console = Console(stderr=False, highlight=False, soft_wrap=True)

    def run(self) -> int:
        """Start everything, serve until SIGINT or SIGTERM, stop everything. Returns the exit code."""
        # Before the handlers: this may download a model, and an interrupt simply ends it while there is nothing to stop.
        redis_url = self._check()
        on_termination(self._stopping.set)
        try:
            self._start(redis_url)
            if self._wait_until_ready():
                self._announce()
                self._watch()
            return 0
        finally:
            self._stop()

    # ---- start --------------------------------------------------------------------------------------------------------
    def _check(self) -> str | None:
        """What would keep the stack from serving, before anything is started. Returns the Redis URL to use; None: start one."""
        plan, settings = self._plan, self._settings
        check_port(settings.host, settings.port)
        self._check_roles_agree()
        source = resolve_model(settings.model, settings.load_format, settings.max_model_len)
        self._model_name = settings.served_model_name or source.name
        self._check_memory(source)
        if plan.redis_url is not None:
            check_reachable(plan.redis_url)
        return plan.redis_url

    def _check_roles_agree(self) -> None:
        """A router refuses workers whose blocks are not what it expects, and would wait for others for ever."""
        roles: tuple[Role, ...] = ("router", "prefill", "decode")
        per_role = [self._of_role(role) for role in roles]
        for name in ("block_size", "dtype", "quantization"):
            values = [getattr(settings, name) for settings in per_role]
            if len(set(values)) > 1:
                found = ", ".join(f"{role} {value}" for role, value in zip(roles, values, strict=True))
                raise ConfigurationError(f"{name} must be the same for router, prefill and decode: {found}")
        for role, settings in list(zip(roles, per_role, strict=True))[1:] if self._plan.num_prefill else ():
            if settings.tensor_parallel_size > 1 and may_use_gpu(settings.device):
                raise ConfigurationError(
                    f"tensor_parallel_size = {settings.tensor_parallel_size} for {role}: KV of ranks on several GPUs cannot go from one "
                    "worker to another yet; add --aggregated, or set PAGEWIRE_DEVICE=cpu"
                )
        if self._plan.num_prefill and [settings.kv_cache_dtype for settings in per_role[1:]] == ["auto", "fp8"]:
            raise ConfigurationError(
                "kv_cache_dtype fp8 for decode alone: it takes no KV of a wider type than its own; set PAGEWIRE_KV_CACHE_DTYPE=fp8 for both"
            )
        lengths = {settings.max_model_len for settings in per_role}
        model = (self._settings.model, self._settings.load_format)
        if len(lengths) > 1 and len({resolve_model(*model, length).fingerprint for length in lengths}) > 1:
            raise ConfigurationError(
                "max_model_len must be on one side of this model's original context for router, prefill and decode: past it the rotary "
                "embedding is another one"
            )
        cpu_weights = [settings.cpu_weights for settings in per_role]
        if "fp16" in cpu_weights and len(set(cpu_weights)) > 1:  # the others have the model's own values, and so the same KV
            found = ", ".join(f"{role} {value}" for role, value in zip(roles, cpu_weights, strict=True))
            raise ConfigurationError(f"cpu_weights fp16 is another model to all but those that have it too: {found}")

    def _of_role(self, role: Role) -> Settings:
        """A worker's settings, as far as this process hands them on."""
        return load_settings(role, self._environ(), model=self._settings.model)

    def _check_memory(self, source: ModelSource) -> None:
        """Each worker checks its own share too; only here is it known how many there are."""
        available = available_memory_bytes()
        if available is None:
            return
        needed = 0
        roles: tuple[tuple[Role, int], ...] = (("prefill", self._plan.num_prefill), ("decode", self._plan.num_decode))
        for role, count in roles:
            settings = self._of_role(role)
            needed += count * int(settings.kv_host_cache_gib * (1 << 30))
            if may_use_gpu(settings.device):
                continue  # its weights and blocks take the GPU's memory, which it looks at itself
            itemsize = 2 if settings.dtype in ("bfloat16", "float16") else 4
            num_ranks, block_nbytes = settings.tensor_parallel_size, source.config.kv_bytes_per_token(itemsize) * settings.block_size
            kv_cache_gib = settings.kv_cache_gib or CPU_KV_CACHE_GIB
            kv_nbytes = settings.num_blocks * block_nbytes if settings.num_blocks else num_ranks * int(kv_cache_gib * (1 << 30))
            is_stored = num_ranks == 1 and itemsize == 4 and settings.cpu_weights in ("auto", "stored", "int16")
            is_stored = is_stored and settings.quantization is None and source.format != "dummy"
            weights_nbytes = source.num_stored_bytes if is_stored else source.num_weight_bytes(itemsize, settings.quantization)
            needed += count * (weights_nbytes + kv_nbytes)
        if needed > available:
            raise ConfigurationError(
                f"{source.name} on {self._plan.num_prefill + self._plan.num_decode} workers takes {needed >> 20} MiB and "
                f"{available >> 20} MiB are free: start fewer workers, set PAGEWIRE_KV_CACHE_GIB or PAGEWIRE_KV_HOST_CACHE_GIB lower, or "
                "choose a smaller model"
            )

    def _environ(self) -> dict[str, str]:
        """For every service, with what was settled here; a setting of one role still comes first, where it may."""
        names = ("model", "device", "gpu_memory_utilization", "kv_transport", "load_format", "kv_wire_dtype", "kv_cache_dtype",
                 "kv_host_cache_gib", "cpu_weights", "quantization", "tensor_parallel_size")  # fmt: skip
        values = {name: getattr(self._settings, name) for name in names}
        return {**os.environ, **{f"PAGEWIRE_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}}

    def _start(self, redis_url: str | None) -> None:
        plan, settings = self._plan, self._settings
        if redis_url is None:
            port = free_port()
            redis_url = f"redis://127.0.0.1:{port}/0"
            self._redis = Child("redis", server_command(port), _without_keys(os.environ), reports_status=False)
            self._redis.start()
        # A Redis of the user's may serve other stacks too: their workers must not be taken for ours.
        suffix = "" if self._redis is not None else f"@{socket.gethostname()}:{settings.port}"
        # Workers before the router: they take longest.
        for role, places in self._places().items():
            num_ranks = len(places) * self._of_role(role).tensor_parallel_size
            num_threads = settings.num_threads or max(1, available_cpus() // max(1, num_ranks))
            for index, place in enumerate(places):
                name = f"{role}-{index}"
                extra = {"PAGEWIRE_WORKER_ID": name + suffix, "PAGEWIRE_NUM_THREADS": str(num_threads)}
                extra |= {"PAGEWIRE_DEVICE": place.device, "PAGEWIRE_NUM_GPU_WORKERS": str(place.num_gpu_workers)}
                extra |= _kv_ports(role, index, plan.num_decode)
                self._add(role, name, redis_url, extra)
        extra = {"PAGEWIRE_HOST": settings.host, "PAGEWIRE_PORT": str(settings.port), "PAGEWIRE_AGGREGATED": str(settings.aggregated)}
        if settings.api_keys is not None:
            extra[_API_KEYS] = settings.api_keys.get_secret_value()
        self._add("router", "router", redis_url, extra)

    def _places(self) -> dict[Literal["prefill", "decode"], list[Place]]:
        plan = self._plan
        of_prefill, of_decode = self._of_role("prefill"), self._of_role("decode")
        prefill = WorkerGroup(plan.num_prefill, of_prefill.device, of_prefill.tensor_parallel_size)
        decode = WorkerGroup(plan.num_decode, of_decode.device, of_decode.tensor_parallel_size)
        num_gpus = count_gpus() if any(may_use_gpu(group.device) for group in (prefill, decode)) else 0
        prefill_places, decode_places = place_workers(prefill, decode, num_gpus)
        return {"prefill": prefill_places, "decode": decode_places}

    def _add(self, role: str, name: str, redis_url: str, extra: dict[str, str]) -> None:
        # The terminal is for the user: what services log as information is shown on request (PAGEWIRE_LOG_LEVEL=info).
        environ = {"PAGEWIRE_LOG_LEVEL": "warning", **_without_keys(self._environ()), **extra}
        environ |= {"REDIS_URL": redis_url, "PAGEWIRE_REDIS_URL": redis_url}
        # What was settled here must not be settled otherwise for one role.
        for setting in ("MODEL", "REDIS_URL", "HOST", "PORT", "WORKER_ID", "AGGREGATED", "DEVICE", "NUM_GPU_WORKERS"):
            environ.pop(f"PAGEWIRE_{role.upper()}_{setting}", None)
        child = Child(name, [sys.executable, "-m", f"services.{role}"], environ)
        child.start()
        self._services.append(child)

    def _wait_until_ready(self) -> bool:
        """False when asked to stop meanwhile. ConfigurationError when a service says it cannot start."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        url = f"{self._url()}/ready"
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
        show_bar = self._console.is_terminal and not self._plan.is_json
        if not show_bar:
            self._say("loading", f"loading {self._model_name} ...")
        with Progress(*columns, console=self._console, transient=True, disable=not show_bar) as progress:
            task = progress.add_task(f"loading {self._model_name}", total=1.0)
            while not self._stopping.wait(WATCH_INTERVAL_S):
                workers = [child for child in self._services if child.name != "router"]
                progress.update(task, completed=sum(child.fraction for child in workers) / len(workers))
                all_run = self._restart_dead(is_starting=True)
                if all_run and all(child.is_ready for child in workers) and _answers(url):
                    return True
                if time.monotonic() > deadline_s:
                    raise ConfigurationError(f"not ready after {READY_TIMEOUT_S:.0f} s; see the messages above")
        return False

    def _announce(self) -> None:
        url = self._url()
        body = json.dumps({"model": self._model_name, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0})
        if self._plan.is_json:
            pids = {child.name: child.pid for child in [*self._services, *([self._redis] if self._redis else [])]}
            devices = {child.name: child.device for child in self._services if child.device is not None}
            self._emit({"event": "ready", "url": url, "model": self._model_name, "pids": pids, "devices": devices})
            return
        needs_key = self._settings.api_keys is not None or self._settings.api_keys_file is not None
        key = ' -H "Authorization: Bearer $PAGEWIRE_API_KEY"' if needs_key else ""
        self._console.print(f"[bold green]ready[/]  {url}  {self._model_name}", markup=True)
        placed = ", ".join(f"{child.name} {child.device}" for child in self._services if child.device is not None)
        self._console.print(f"on:    {placed}", markup=False)
        self._console.print(f"try:   curl -s {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'", markup=False)
        self._console.print("stop:  Ctrl-C", markup=False)

    def _url(self) -> str:
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::", "") else self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._settings.port}"

    # ---- watch and stop -----------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_INTERVAL_S):
            self._restart_dead(is_starting=False)

    def _restart_dead(self, is_starting: bool) -> bool:
        """Restart what has died and say so; True when everything runs."""
        all_run = True
        for child in [*self._services, *([self._redis] if self._redis else [])]:
            pid = child.pid
            ending = child.poll()
            if child.pid not in (None, pid) and self._plan.is_json:
                self._emit({"event": "started", "child": child.name, "pid": child.pid})
            if ending is not None and child.failure is not None and is_starting:
                raise ConfigurationError(child.failure)
            if ending is not None:
                self._say("restarted", f"{child.name} died ({ending}); restarting it", child=child.name, ending=ending)
            all_run = all_run and child.pid is not None
        return all_run

    def _stop(self) -> None:
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        # The router first: it answers the requests in flight, and does not take its workers' leaving for their death.
        for group in (self._services[-1:], self._services[:-1]):
            for child in group:
                child.terminate()
            for child in group:
                child.wait(deadline_s)
        if self._redis is not None:
            self._redis.terminate()
            self._redis.wait(time.monotonic() + 1.0)

    def _say(self, event: str, text: str, **fields: str) -> None:
        if self._plan.is_json:
            self._emit({"event": event, **fields})
        else:
            self._console.print(text, markup=False)

    @staticmethod
    def _emit(event: dict[str, object]) -> None:
        print(json.dumps(event), flush=True)


def _kv_ports(role: Literal["prefill", "decode"], index: int, num_decode: int) -> dict[str, str]:
    """Where ports are given, those of the first worker: each further one takes the next, prefill after decode where they share one."""
    settings = load_settings(role)
    ports = {"KV_PORT": settings.kv_port, "KV_ADVERTISE_PORT": settings.kv_advertise_port}
    is_shared = role == "prefill" and "PAGEWIRE_PREFILL_KV_PORT" not in os.environ
    position = index + (num_decode if is_shared else 0)
    return {f"PAGEWIRE_{role.upper()}_{name}": str(port + position * (1 + settings.kv_lanes)) for name, port in ports.items() if port}


def _without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Only the router gets the API keys, and as they were settled here."""
    return {name: value for name, value in environ.items() if name not in (_API_KEYS, "PAGEWIRE_ROUTER_API_KEYS")}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
