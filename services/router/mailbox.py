"""A queue with one reader on one event loop. As asyncio.Queue, without what only several readers, a limit or `join` would need."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Mail = TypeVar("Mail")


class Mailbox(Generic[Mail]):
    def __init__(self) -> None:
        self._mails: deque[Mail] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._mails)

    def put(self, mail: Mail) -> None:
        self._mails.append(mail)
        # Done already: the reader was told, or cancelled.
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def get(self) -> Mail:
        """The oldest mail, as soon as there is one."""
        while not self._mails:
            self._arrival = self._loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        return self._mails.popleft()
