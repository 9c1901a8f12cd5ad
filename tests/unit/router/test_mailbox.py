from __future__ import annotations

import asyncio

import pytest

from services.router.mailbox import Mailbox


async def test_mails_come_in_order_whether_they_or_the_reader_came_first() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.put(2)
    assert len(mailbox) == 2
    assert [await mailbox.get(), await mailbox.get()] == [1, 2]
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put(3)
    mailbox.put(4)
    assert await reader == 3
    assert await mailbox.get() == 4
    assert len(mailbox) == 0


async def test_a_reader_that_was_cancelled_takes_no_mail_with_it() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await mailbox.get() == 1
