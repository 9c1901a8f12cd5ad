"""The `pagewire` command. Only what every command needs is imported here; each command imports its own, so --help is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shared.errors import ConfigurationError, PagewireError

app = typer.Typer(
    name="pagewire",
    help="Serve a language model with prefill and decode on separate services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str | None, typer.Option(help="'smollm2' (packaged), a .gguf file, a Hugging Face directory, or a Hub id.")]
RedisUrl = Annotated[str | None, typer.Option("--redis", help="Redis URL. Default: REDIS_URL, else one is started.")]
KVHostCacheGiB = Annotated[
    float | None, typer.Option(help="Host memory of each worker, in GiB, for KV blocks that its cache evicts. Default: 0, none.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. Default: auto, a GPU where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output: one JSON object a line.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", help="A key that clients must send; may be repeated. It shows in the process list: or set PAGEWIRE_API_KEYS_FILE."
    ),
]
Url = Annotated[str, typer.Option(help="Where the router listens.", envvar="PAGEWIRE_URL")]


@app.command()
def up(
    model: Model = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Number of prefill workers. Default: 1.")] = None,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode workers.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address the router listens on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port the router listens on. Default: 8000.")] = None,
    aggregated: Annotated[bool, typer.Option("--aggregated", help="No prefill workers: decode workers compute prompts too.")] = False,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Processes of each worker that share each layer, on GPUs one for each. Default: 1.")
    ] = None,
    device: Device = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Part of a GPU's memory that the workers on it take together. Default: 0.9.")
    ] = None,
    transport: Annotated[str | None, typer.Option(help="How KV travels: cuda, shm, ipc or tcp. Default: the fastest.")] = None,
    load_format: Annotated[str | None, typer.Option(help="dummy: random weights, for a directory that has none.")] = None,
    kv_wire_dtype: Annotated[str | None, typer.Option(help="How KV values travel: auto (unchanged) or fp8 (a quarter of fp32).")] = None,
    kv_host_cache_gib: KVHostCacheGiB = None,
    cpu_weights: Annotated[
        str | None,
        typer.Option(help="Weights on a CPU: stored (the default), int16 (faster, a little rounded), fp16 or fp32."),
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="fp8: matrices of the layers as E4M3, for GPUs of Hopper and later. Default: none.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="How KV stands in the cache: auto (the engine's dtype) or fp8, on a GPU. Default: auto.")
    ] = None,
    redis: RedisUrl = None,
    api_key: ApiKeys = None,
    as_json: Json = False,
) -> None:
    """Start the whole system on this machine and serve until Ctrl-C."""
    from services.local.stack import Stack, StackPlan
    from shared.config import load_settings

    import os  # isort: skip

    settings = load_settings(
        "router",
        model=model,
        host=host,
        port=port,
        aggregated=aggregated or None,
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        api_keys=_joined(api_key),
        kv_transport=transport,
        kv_wire_dtype=kv_wire_dtype,
        kv_host_cache_gib=kv_host_cache_gib,
        load_format=load_format,
        tensor_parallel_size=tensor_parallel,
        cpu_weights=cpu_weights,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    if settings.aggregated and prefill is not None:
        raise ConfigurationError("--prefill and --aggregated exclude each other: an aggregated system has no prefill workers")
    num_prefill = 0 if settings.aggregated else prefill or 1
    redis_url = redis or os.environ.get("REDIS_URL") or os.environ.get("PAGEWIRE_REDIS_URL") or None
    raise typer.Exit(Stack(StackPlan(settings, num_prefill, decode, redis_url, as_json)).run())


@app.command()
def router(
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")] = None,
    redis: RedisUrl = None,
    api_key: ApiKeys = None,
) -> None:
    """Run one router (as its container does). Further settings: PAGEWIRE_* variables, see the README."""
    from services.router.__main__ import run
    from shared.config import load_settings

    raise typer.Exit(run(load_settings("router", model=model, host=host, port=port, redis_url=redis, api_keys=_joined(api_key))))


@app.command()
def prefill(model: Model = None, redis: RedisUrl = None, device: Device = None, kv_host_cache_gib: KVHostCacheGiB = None) -> None:
    """Run one prefill worker (as its container does). Further settings: PAGEWIRE_* variables, see the README."""
    from services.prefill.__main__ import run
    from shared.config import load_settings

    raise typer.Exit(run(load_settings("prefill", model=model, redis_url=redis, device=device, kv_host_cache_gib=kv_host_cache_gib)))


@app.command()
def decode(model: Model = None, redis: RedisUrl = None, device: Device = None, kv_host_cache_gib: KVHostCacheGiB = None) -> None:
    """Run one decode worker (as its container does). Further settings: PAGEWIRE_* variables, see the README."""
    from services.decode.__main__ import run
    from shared.config import load_settings

    raise typer.Exit(run(load_settings("decode", model=model, redis_url=redis, device=device, kv_host_cache_gib=kv_host_cache_gib)))


@app.command()
def complete(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    url: Url = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a chat message.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Where the server needs one.", envvar="PAGEWIRE_API_KEY")] = None,
    as_json: Json = False,
) -> None:
    """Complete a prompt on a running server; the answer streams to the terminal."""
    from services.local.completion_client import stream_completion

    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    for event in stream_completion(url, text, chat, body, api_key):
        if as_json:
            print(json.dumps(event), flush=True)
        else:
            print(event.get("text", ""), end="", flush=True)
    if not as_json:
        print()


@app.command()
def doctor(
    model: Annotated[str, typer.Option(help="The model to look for.")] = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    as_json: Json = False,
) -> None:
    """Check this machine (Python, torch, GPU, Redis, ports, shared memory, model) and say what to do. Exit code 1 if it cannot serve."""
    from services.local.doctor import run_checks, show

    checks = run_checks(model, port)
    show(checks, as_json)
    raise typer.Exit(0 if all(check.status != "fail" for check in checks) else 1)


@app.command("export-tokenizer")
def export_tokenizer(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made if missing.")],
    model: Annotated[str, typer.Option(help="The model whose tokenizer it is.")] = "smollm2",
) -> None:
    """Write the served model's tokenizer as files that client tools (transformers, load generators) can read."""
    from shared.model_files.model_source import resolve_model

    resolve_model(model).load_tokenizer().save_pretrained(folder)
    print(folder)


@app.command()
def keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the key goes; readable by you alone.")]) -> None:
    """Make a key for KV transfers (PAGEWIRE_KV_KEY_FILE): decode workers let in prefill workers that hold it, and nobody else.

    In a file that has keys already the new one comes first; the others are let in until you delete their lines.
    """
    from shared.transport.wires.curve import write_key_file

    try:
        public = write_key_file(file).public.decode()
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror}") from error
    print(f"{file}: new key, public half {public}")


@app.command()
def chaos(
    simulated: Annotated[int | None, typer.Option(min=1, help="Faults to make in simulated clusters: thousands take seconds.")] = None,
    real: Annotated[
        int | None, typer.Option(min=1, help="Faults to make in a stack of real processes: a thousand take a quarter hour.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which faults: the same seed draws the same ones.")] = 0,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers of the real stack.")] = 2,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers of the real stack.")] = 2,
    as_json: Json = False,
) -> None:
    """Break things on purpose and check that nothing is corrupted, leaked or forgotten. Exit code 1 when a check failed."""
    import signal

    from services.chaos.chaos_event import show
    from services.chaos.real_run import run_real
    from services.chaos.simulated_run import run_simulated

    if simulated is None and real is None:
        raise ConfigurationError("nothing to do: give --simulated N, --real N or both")
    # Whoever ends the run ends its stack with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    is_ok = True
    if simulated is not None:
        is_ok = show(run_simulated(simulated, seed), simulated, as_json)
    if real is not None:
        is_ok = show(run_real(real, seed, prefill, decode), real, as_json) and is_ok
    raise typer.Exit(0 if is_ok else 1)


def _joined(api_keys: list[str] | None) -> str | None:
    # As a variable of the router's process an empty key would be none at all, and the server open.
    if api_keys and not all(api_keys):
        raise ConfigurationError("--api-key is empty: give the key, or leave the option out to do without")
    return ",".join(api_keys) if api_keys else None


def main() -> None:
    """Entry point: errors of ours are one line on stderr and an exit code (2: cannot start as configured)."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except PagewireError as error:
        print(f"pagewire: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
