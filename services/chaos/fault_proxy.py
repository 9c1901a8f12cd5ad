"""A TCP proxy that stands between two services and does to their connections what networks do: delays, throttles, freezes, cuts, damages.

Each link is a port that leads to another. Where a connection is ZMTP without encryption (a KV data lane on a trusted network), whole
messages can be dropped, doubled, overtaken or kept back too; elsewhere only bytes can.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.chaos.zmtp_stream import Piece, ZmtpStream, encode_message

_READ_NBYTES = 1 << 18
_SLICE_NBYTES = 1 << 14
"""What a throttled link writes at a time."""
_MAX_QUEUED = 64
_FROZEN_POLL_S = 0.01
_OVERTAKE_WAIT_S = 0.3
"""A message that is to be overtaken waits this long for one that could."""


class Fault(Enum):
    """What befalls one message, or (the last two) a few bytes of any stream."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    LATE = "late"
    FLIP = "flip"
    FLIP_BYTE = "flip-byte"
    DROP_BYTE = "drop-byte"


_ON_BYTES = (Fault.FLIP_BYTE, Fault.DROP_BYTE)


@dataclass(eq=False)
class Strike:
    """A fault that waits for its message. `is_struck` is true once it has happened."""

    fault: Fault
    delay_s: float = 0.0
    """LATE: how late."""
    is_meant: Callable[[Sequence[bytes]], bool] = lambda frames: True
    """Asked with the frames of each message, until it says yes."""
    is_struck: bool = False


class Flow:
    """One direction of a link: what holds for all its connections. Attributes may be set from any thread, at any time."""

    def __init__(self, seed: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        """None: as fast as it goes."""
        self.is_frozen = False
        self.num_bytes = 0
        self.num_messages = 0
        self.struck: Counter[Fault] = Counter()
        self._strikes: deque[Strike] = deque()
        self._random = random.Random(seed)

    def strike(self, fault: Fault, delay_s: float = 0.0, is_meant: Callable[[Sequence[bytes]], bool] = lambda frames: True) -> Strike:
        """Let a fault befall the next message that `is_meant`, or the next bytes."""
        strike = Strike(fault, delay_s, is_meant)
        self._strikes.append(strike)
        return strike

    def withdraw(self, strike: Strike) -> bool:
        """Not any more; False: it has happened already."""
        with contextlib.suppress(ValueError):
            self._strikes.remove(strike)
        return not strike.is_struck

    def reset(self) -> None:
        """No faults any more; what is on its way arrives."""
        self.delay_s, self.bytes_per_s, self.is_frozen = 0.0, None, False
        self._strikes.clear()

    def take_strike(self, piece: Piece) -> Strike | None:
        """The first fault that befalls this piece."""
        for strike in list(self._strikes):
            if strike.fault in _ON_BYTES or (piece.frames is not None and strike.is_meant(piece.frames)):
                with contextlib.suppress(ValueError):  # withdrawn meanwhile
                    self._strikes.remove(strike)
                    strike.is_struck = True
                    self.struck[strike.fault] += 1
                    return strike
        return None

    def damage(self, piece: Piece, fault: Fault) -> bytes:
        """The bytes of the piece with one bit changed or one byte missing."""
        if fault is Fault.FLIP:
            assert piece.frames is not None
            frames = list(piece.frames)
            index = self._random.choice([index for index, frame in enumerate(frames) if frame] or [0])
            frames[index] = self._flipped(frames[index])
            return encode_message(frames)
        if fault is Fault.FLIP_BYTE:
            return self._flipped(piece.data)
        where = self._random.randrange(len(piece.data))
        return piece.data[:where] + piece.data[where + 1 :]

    def _flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        damaged = bytearray(data)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


class Link:
    """One port and where it leads. `forward` runs from who connected to who listens, `back` the other way."""

    def __init__(self, port: int, target_port: int, host: str, seed: int) -> None:
        self.port = port
        self.target_port = target_port
        self.host = host
        self.forward = Flow(2 * seed)
        self.back = Flow(2 * seed + 1)
        self.connections: set[_Connection] = set()

    def reset(self) -> None:
        self.forward.reset()
        self.back.reset()


class FaultProxy:
    """Runs in a thread of its own from `start` to `close`; every method may be called from any thread."""

    def __init__(self, ports: Sequence[tuple[int, int]], host: str = "127.0.0.1", seed: int = 0) -> None:
        """`ports`: (port to listen on, port to connect to), both on `host`."""
        self.links = [Link(port, target, host, seed + index) for index, (port, target) in enumerate(ports)]
        self._host = host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._servers: list[asyncio.Server] = []

    def start(self) -> None:
        """Raises OSError when a port cannot be listened on."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Cut everything and stop listening."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, link: Link, *, abruptly: bool) -> int:
        """End the link's connections, by RST (`abruptly`) or by FIN once what was taken in has gone out. How many there were."""

        async def cut_all() -> int:
            connections = list(link.connections)
            for connection in connections:
                connection.reset() if abruptly else connection.finish()
            return len(connections)

        return asyncio.run_coroutine_threadsafe(cut_all(), self._loop).result()

    async def _listen(self) -> None:
        for link in self.links:

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link = link) -> None:
                await _Connection(link, reader, writer).run()

            self._servers.append(await asyncio.start_server(accept, self._host, link.port, limit=_READ_NBYTES))

    async def _shut(self) -> None:
        for server in self._servers:
            server.close()
        for link in self.links:
            for connection in list(link.connections):
                connection.reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """One accepted connection and the one behind it. All on the proxy's loop."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._reader = reader
        self._writers = [writer]
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        self._link.connections.add(self)
        try:
            reader, writer = await asyncio.open_connection(self._link.host, self._link.target_port, limit=_READ_NBYTES)
            self._writers.append(writer)
            pumps = [_Pump(self._link.forward, self._reader, writer), _Pump(self._link.back, reader, self._writers[0])]
            self._tasks = [asyncio.create_task(pump.run()) for pump in pumps]
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            self.reset()  # as if nobody listened here either
        finally:
            self._link.connections.discard(self)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock is not None and writer.transport is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def finish(self) -> None:
        for writer in self._writers:
            writer.close()


class _Pump:
    """One direction of one connection: reads, lets the faults befall what it read, writes."""

    def __init__(self, flow: Flow, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._flow = flow
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(_MAX_QUEUED)
        self._overtaken: bytes | None = None
        self._late: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until either end has closed."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await writing
        except OSError:
            pass
        finally:
            tasks = [writing, reading, *self._late]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        stream = ZmtpStream()
        with contextlib.suppress(OSError):
            while data := await self._reader.read(_READ_NBYTES):
                for piece in stream.feed(data):
                    await self._pass(piece)
        await self._queue.put(None)

    async def _pass(self, piece: Piece) -> None:
        flow = self._flow
        flow.num_bytes += len(piece.data)
        flow.num_messages += piece.frames is not None
        strike = flow.take_strike(piece)
        fault = strike.fault if strike is not None else None
        if fault in (Fault.FLIP, Fault.FLIP_BYTE, Fault.DROP_BYTE):
            assert fault is not None
            await self._put(flow.damage(piece, fault))
        elif fault is Fault.DUPLICATE:
            await self._put(piece.data)
            await self._put(piece.data)
        elif fault is Fault.LATE:
            assert strike is not None
            self._put_after(strike.delay_s, piece.data)
        elif fault is Fault.REORDER and self._overtaken is None:
            self._overtaken = piece.data
            self._spawn(self._give_up_overtaking(piece.data))
            return
        elif fault is not Fault.DROP:
            await self._put(piece.data)
        if self._overtaken is not None and piece.frames is not None:
            overtaken, self._overtaken = self._overtaken, None
            await self._put(overtaken)

    async def _give_up_overtaking(self, data: bytes) -> None:
        await asyncio.sleep(_OVERTAKE_WAIT_S)
        if self._overtaken is data:
            self._overtaken = None
            await self._put(data)

    def _put_after(self, delay_s: float, data: bytes) -> None:
        async def put() -> None:
            await asyncio.sleep(delay_s)
            await self._put(data)

        self._spawn(put())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _put(self, data: bytes) -> None:
        await self._queue.put((self._loop.time() + self._flow.delay_s, data))

    async def _write(self) -> None:
        while (item := await self._queue.get()) is not None:
            due_s, data = item
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            # Whole messages: those kept back are put between others, never into one.
            left = memoryview(data)
            while left:
                while self._flow.is_frozen:
                    await asyncio.sleep(_FROZEN_POLL_S)
                rate = self._flow.bytes_per_s
                part = left if rate is None else left[: max(1, min(_SLICE_NBYTES, int(rate / 20)))]
                self._writer.write(part)
                await self._writer.drain()
                left = left[len(part) :]
                if rate is not None:
                    await asyncio.sleep(len(part) / rate)
