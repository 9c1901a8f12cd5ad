"""FrameReader on real sockets: nothing is lost, whatever else the socket is used for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from services.router.frame_reader import FrameReader


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    server, client = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    yield server, client
    context.destroy(linger=0)


async def until(received: list[object], count: int) -> None:
    async with asyncio.timeout(30):
        while len(received) < count:
            await asyncio.sleep(0.001)


async def test_every_frame_arrives_in_order_though_the_reader_also_sends(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    server, client = pair
    received: list[bytes] = []
    reader = FrameReader(client, received.append)
    for number in range(500):
        server.send(b"%d" % number)
        client.send(b"")  # may take in the signal of what has just arrived
        reader.read_soon()
        if number % 7 == 0:
            await asyncio.sleep(0)
    await until(received, 500)
    assert received == [b"%d" % number for number in range(500)]
    reader.close()


async def test_a_flood_leaves_others_their_turn(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    server, client = pair
    for _ in range(1000):
        server.send(b"")
    assert client.poll(30_000)
    await asyncio.sleep(0.2)
    received: list[object] = []
    reader = FrameReader(client, received.append)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(received) < 1000
    await until(received, 1000)
    reader.close()


async def test_a_reader_closed_by_its_own_message_reads_no_further(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    server, client = pair
    received: list[object] = []

    def take(frames: list[bytes]) -> None:
        received.append(frames)
        reader.close()
        client.close(linger=0)

    reader = FrameReader(client, take)
    for _ in range(3):
        server.send(b"")
    await until(received, 1)
    await asyncio.sleep(0.05)
    assert len(received) == 1
