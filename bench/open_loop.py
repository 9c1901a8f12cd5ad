"""TTFT and ITL at the client of a running stack: requests one at a time, then as they arrive (Poisson), whatever the answers' pace.

    pagewire up &   python bench/open_loop.py [--url http://127.0.0.1:8000] [--lengths 512,4096,16384] [--rates 3,6,8] [--seconds 15]
        [--prompt 4096] [--out 128]

Prompts are random token ids, answers greedy without an end token. The same load as the peers get in bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass

import httpx

TIMEOUT_S = 300.0
NUM_UNLOADED = 5


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    gaps_s: list[float]


class Load:
    def __init__(self, client: httpx.AsyncClient, vocab_size: int) -> None:
        self._client = client
        self._rng = random.Random(3)
        self._vocab_size = vocab_size

    async def ask(self, num_prompt_tokens: int, num_output_tokens: int) -> Answer:
        prompt = [self._rng.randrange(100, self._vocab_size) for _ in range(num_prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": num_output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        start_s = time.perf_counter()
        times_s: list[float] = []
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError((await response.aread()).decode()[:300])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    if '"error"' in line[:12]:
                        raise RuntimeError(line[:300])
                    if json.loads(line[6:]).get("choices"):
                        times_s.append(time.perf_counter())
        return Answer(times_s[0] - start_s, [after - before for before, after in itertools.pairwise(times_s)])

    async def unloaded(self, num_prompt_tokens: int) -> None:
        answers = [await self.ask(num_prompt_tokens, 32) for _ in range(NUM_UNLOADED)]
        ttft_ms, itl_ms = percentile([a.ttft_s for a in answers], 0.5), percentile([gap for a in answers for gap in a.gaps_s[1:]], 0.5)
        first_ms = percentile([a.gaps_s[0] for a in answers], 0.5)
        print(f"unloaded, {num_prompt_tokens}: TTFT {ttft_ms:.1f} ms, first gap {first_ms:.1f} ms, ITL {itl_ms:.2f} ms", flush=True)

    async def arriving(self, rate: float, seconds: float, num_prompt_tokens: int, num_output_tokens: int) -> None:
        tasks: list[asyncio.Task[Answer]] = []
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < seconds:
            tasks.append(asyncio.create_task(self.ask(num_prompt_tokens, num_output_tokens)))
            await asyncio.sleep(self._rng.expovariate(rate))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        answers = [result for result in results if isinstance(result, Answer)]
        failures = [result for result in results if not isinstance(result, Answer)]
        ttfts, gaps = [a.ttft_s for a in answers], [gap for a in answers for gap in a.gaps_s]
        shown = "/".join(f"{percentile(ttfts, p):.0f}" for p in (0.5, 0.95, 0.99)) if answers else "-"
        between = "/".join(f"{percentile(gaps, p):.1f}" for p in (0.5, 0.95, 0.99, 1.0)) if gaps else "-"
        print(
            f"{rate:g}/s x {num_prompt_tokens}: {len(answers)} answered, {len(failures)} failed, TTFT p50/p95/p99 {shown} ms, "
            f"ITL p50/p95/p99/max {between} ms",
            flush=True,
        )
        for failure in failures[:2]:
            print(f"  {failure!r}"[:300], flush=True)


def percentile(values_s: list[float], share: float) -> float:
    """Milliseconds."""
    return 1000 * sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))]


async def run(options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        load = Load(client, options.vocab)
        for _ in range(3):
            await load.ask(512, 8)
        for length in filter(None, options.lengths.split(",")):
            await load.unloaded(int(length))
        for rate in filter(None, options.rates.split(",")):
            await load.arriving(float(rate), options.seconds, options.prompt, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--lengths", default="512,4096,16384", help="of prompts one at a time")
    parser.add_argument("--rates", default="3,6,8", help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each rate")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=40000, help="ids are below this")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
