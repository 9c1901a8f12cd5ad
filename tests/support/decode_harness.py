"""A decode worker stepped by the test: the real engine over a tiny model, no Redis and no router; what it sends is kept."""

from __future__ import annotations

from collections import defaultdict
from types import TracebackType
from typing import Any

from opentelemetry.trace import NoOpTracer

from services.decode.worker import DecodeWorker
from shared.config import Settings
from shared.engine.engine_core import StepResult
from shared.messages import AbortRequest, DecodeRequest, RequestFailed, RequestOutput, WorkerMessage, WorkerTiming
from shared.model_files.model_source import ModelSource
from shared.sampling_params import SamplingParams


class DecodeHarness:
    """Prompts are computed by the worker itself. Use as a context manager: it closes the sockets."""

    def __init__(self, source: ModelSource, **settings: Any) -> None:
        defaults = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 64, "debug": True, "num_threads": 1, "max_step_ms": 1e6}
        defaults["kv_peer_timeout_s"] = 30.0  # no peer is silent but for a machine that is busy
        self.worker = DecodeWorker(source, Settings(**{**defaults, **settings}), NoOpTracer())
        self.sent: list[WorkerMessage] = []
        self.peak_num_used = 0
        on_computed = self.worker.on_computed

        def note_peak(result: StepResult) -> None:
            self.peak_num_used = max(self.peak_num_used, self.num_used)
            on_computed(result)

        self.worker.on_computed = note_peak  # type: ignore[method-assign]
        self.worker.rpc.send = lambda _router, message: self.sent.append(message)  # type: ignore[method-assign]

    def __enter__(self) -> DecodeHarness:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.worker.fail_all("the test is over")
        self.worker.close_transport()
        # Its thread, which would close these, never ran; a context with open sockets would wait for ever.
        self.worker.rpc._socket.close(0)
        self.worker.rpc._wake_receiver.close(0)
        self.worker.rpc.close()
        self.worker.engine.close()

    @property
    def num_used(self) -> int:
        return self.worker.engine.manager.num_used()

    def submit(self, request_id: str, prompt: list[int], deadline_s: float = 60.0, **fields: Any) -> None:
        """`fields` of DecodeRequest, or else of its sampling."""
        own = {"transfer_id": None} | {name: fields.pop(name) for name in list(fields) if name in DecodeRequest.model_fields}
        sampling = SamplingParams(**fields)
        self.worker.accept(
            b"router",
            DecodeRequest(request_id=request_id, token_ids=tuple(prompt), sampling=sampling, deadline_s=deadline_s, **own),
        )

    def abort(self, request_id: str, sequence_index: int | None = None) -> None:
        self.worker.abort(AbortRequest(request_id=request_id, reason="test", sequence_index=sequence_index))

    def turn(self) -> bool:
        """One turn of the worker's loop without its waits. False: there was nothing to compute."""
        self.worker._drain_inbox()
        has_computed = self.worker.step()
        self.worker.engine.manager.check_invariants()
        return has_computed

    def run(self, max_turns: int = 5000) -> None:
        """Until nothing is left to do, nor runs; a worker that stands still with work at hand fails the test."""
        num_idle = 0
        for _ in range(max_turns):
            num_idle = 0 if self.turn() else num_idle + 1
            if not self.worker._jobs and self.worker._launched is None:
                return
            assert num_idle < 3, "requests are left and nothing runs"
        raise AssertionError("it does not end")

    # ---- what came out ------------------------------------------------------------------------------------------------
    def outputs(self, request_id: str) -> list[RequestOutput]:
        return [message for message in self.sent if isinstance(message, RequestOutput) and message.request_id == request_id]

    def answers(self, request_id: str) -> list[list[int]]:
        """The tokens of each sequence; they came in order."""
        tokens: dict[int, list[int]] = defaultdict(list)
        for output in self.outputs(request_id):
            assert output.index == len(tokens[output.sequence_index])
            tokens[output.sequence_index].append(output.token_id)
        return [tokens[index] for index in sorted(tokens)]

    def failures(self) -> list[RequestFailed]:
        return [message for message in self.sent if isinstance(message, RequestFailed)]

    def timings(self) -> list[WorkerTiming]:
        return [message for message in self.sent if isinstance(message, WorkerTiming)]
