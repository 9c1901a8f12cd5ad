"""From settings to a running worker: what `python -m services.prefill` and `python -m services.decode` share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Protocol

from opentelemetry.trace import Tracer
from prometheus_client import start_http_server

from shared import telemetry
from shared.config import Settings
from shared.errors import ConfigurationError
from shared.freed_memory import keep_freed_memory
from shared.membership import WorkerRecord
from shared.model_files.model_source import ModelSource, resolve_model
from shared.model_files.weight_reader import PendingWeights, start_loading
from shared.nvidia_driver import may_use_gpu
from shared.startup_phase import log_phase, process_age_s, startup_phase
from shared.worker.metrics import WorkerMetrics
from shared.worker.process import on_termination, report_progress, report_status, set_up_process

logger = logging.getLogger(__name__)


class Runnable(Protocol):
    def run(self) -> None: ...

    def drain(self) -> None: ...

    def record(self) -> WorkerRecord: ...


BuildWorker = Callable[[ModelSource, Settings, Tracer, Callable[[float], None], PendingWeights | None], Runnable]


def run_worker(role: str, settings: Settings, build: Callable[[], BuildWorker]) -> int:
    """Serve until SIGTERM or SIGINT, and then until the requests that are here have ended. Returns an exit code: 0, or 2 when the
    configuration does not allow a start.

    `build` imports the worker's class, and with it torch, after the environment below is set.
    """
    set_up_process(role)
    log_phase("the interpreter", process_age_s())
    # Two workers share a laptop's cores: threads that spin between parallel regions would take them from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    tracer = telemetry.setup_tracing(f"pagewire-{role}")
    try:
        with startup_phase("the model's files"):
            source = resolve_model(settings.model, settings.load_format, settings.max_model_len)
        source = source.with_cpu_weights(settings.cpu_weights).with_quantization(settings.quantization)
        # Read what the engine is to convert while torch is being imported; "stored" weights are a copy of the file, made in a moment.
        is_converted = settings.dtype in ("auto", "float32") and settings.cpu_weights in ("fp16", "fp32")
        is_on_cpu = not may_use_gpu(settings.device) and source.format != "dummy"
        is_whole = settings.tensor_parallel_size == 1
        pending = start_loading(source, report_progress) if is_converted and is_on_cpu and is_whole else None
        with startup_phase("imports"):
            worker_class = build()
        worker = worker_class(source, settings, tracer, report_progress, pending)
        if settings.metrics_port:
            start_http_server(settings.metrics_port, registry=WorkerMetrics.registry_of(worker.record))
    except ConfigurationError as error:
        if not report_status(f"failed {error.message}"):
            print(f"pagewire {role}: {error.message}", file=sys.stderr)
        return error.exit_code
    on_termination(worker.drain)
    log_phase("all", process_age_s())
    report_status(f"ready {worker.record().device}")
    try:
        worker.run()
    finally:
        telemetry.shutdown_tracing(tracer)
    return 0
