"""`python -m services.router`: settings to objects to a listening server. No torch anywhere below."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import zmq

from services.router.app import RouterParts, create_app
from services.router.dispatcher import Dispatcher
from services.router.frontend import Frontend
from services.router.grammar.grammar_checker import GrammarChecker
from services.router.http.api_keys import load_api_keys
from services.router.http.http_protocol import HttpProtocol
from services.router.metrics import RouterMetrics
from services.router.openai.tool_calls import family_of, takes_tools
from services.router.served_model import ChatRenderer, ServedModel
from services.router.workers import WorkerDirectory, WorkerRole
from shared.cache.redis_prefix_index import RedisPrefixIndexReader, make_async_client
from shared.clock import SystemClock
from shared.config import Settings, load_settings
from shared.errors import ConfigurationError
from shared.model_files.model_source import resolve_model
from shared.telemetry import setup_tracing, shutdown_tracing
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from shared.worker.process import report_status, set_up_process

_logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 65
"""Longer than the idle time after which clients and proxies drop a pooled connection themselves (often 5 to 60 s)."""
GRACEFUL_S = 1
"""Requests in flight get this long after SIGTERM; then they are aborted at the workers and answered 503."""
_BACKLOG = 2048


def load_model(settings: Settings) -> ServedModel:
    """Everything but the weights. Raises ModelLoadError."""
    source = resolve_model(settings.model, settings.load_format, settings.max_model_len)
    source = source.with_cpu_weights(settings.cpu_weights).with_quantization(settings.quantization)
    tokenizer = source.load_tokenizer()
    return ServedModel(
        name=settings.served_model_name or source.name,
        fingerprint=source.fingerprint,
        max_model_len=min(source.config.max_model_len, settings.max_model_len or source.config.max_model_len),
        vocab_size=source.config.tokenizer_vocab_size,
        tokenizer=tokenizer,
        render_chat=_chat_renderer(source.chat_template, tokenizer) if source.chat_template is not None else None,
        takes_tools=takes_tools(source.chat_template or ""),
        tool_family=family_of(source.chat_template or ""),
    )


def _chat_renderer(source: str, tokenizer: Tokenizer) -> ChatRenderer:
    template = ChatTemplate(source, tokenizer.special_token_texts)
    return lambda messages, opens_turn, variables: template.render(messages, **{**variables, "add_generation_prompt": opens_turn})


def build_parts(settings: Settings, model: ServedModel) -> RouterParts:
    """The objects of one router. Nothing connects before `start`. Raises ConfigurationError."""
    api_keys = load_api_keys(settings)
    tracer = setup_tracing("pagewire-router")
    client = make_async_client(settings.redis_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    roles: tuple[WorkerRole, ...] = ("decode",) if settings.aggregated else ("prefill", "decode")
    directory = WorkerDirectory(client, context, SystemClock(), settings.redis_namespace, settings.lease_s, model.fingerprint, roles)
    index = RedisPrefixIndexReader(client, settings.redis_namespace)
    metrics = RouterMetrics(model.name, directory)
    dispatcher = Dispatcher(directory, index, metrics, tracer, settings, model.fingerprint)
    checker = GrammarChecker(model.vocab_size)
    frontend = Frontend(model, directory, dispatcher, metrics, tracer, settings, checker)

    async def stop() -> None:
        checker.close()
        await directory.close()
        await index.close()
        await client.aclose()
        context.destroy(linger=0)
        await asyncio.to_thread(shutdown_tracing, tracer, 0.5)

    return RouterParts(model, api_keys, directory, index, frontend, metrics, directory.start, stop)


def listen(settings: Settings) -> socket.socket:
    """A bound socket, before anything slow happens. Raises ConfigurationError when the address is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = "choose another with --port or PAGEWIRE_PORT"
        raise ConfigurationError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; {hint}") from error
    return listener


class _Server(uvicorn.Server):
    """Ends with exit code 0 at a signal, where uvicorn would die of it again; a second signal does not wait for requests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        # What uvicorn says from here on is about tasks it cancels, with tracebacks; clients are told in our own words.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. One line and 2 when the configuration does not allow a start."""
    set_up_process("router")
    for name in ("uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with contextlib.closing(listen(settings)) as listener:
            parts = build_parts(settings, load_model(settings))
            config = uvicorn.Config(
                create_app(parts),
                loop="uvloop",
                http=HttpProtocol,
                ws="none",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACEFUL_S,
                server_header=False,
            )
            host, port = listener.getsockname()[:2]
            _logger.info("listening on http://%s:%s, model %s", host, port, parts.model.name)
            report_status("ready")
            _Server(config).run(sockets=[listener])
    except ConfigurationError as error:
        if not report_status(f"failed {error.message}"):
            print(f"pagewire router: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def main() -> int:
    try:
        return run(load_settings("router"))
    except ConfigurationError as error:
        print(f"pagewire router: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
