"""One side of a KV transfer as a process of its own, to be killed, stopped and restarted by tests.

`decode`: prints its KVPeer as JSON, expects TRANSFER, prints how it ends. `prefill PEER`: offers TRANSFER, sends
half of its blocks, prints `half`, waits for a line, sends the rest and commits, prints how it ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, ReceiverLog, SenderLog, random_memory

from shared.clock import SystemClock
from shared.ids import new_incarnation
from shared.messages import KVPeer
from shared.transport.receiving.kv_receiver import KVReceiver
from shared.transport.sending.kv_sender import KVSender

NUM_BLOCKS = 16
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size


def _say(line: str) -> None:
    print(line, flush=True)


def run_decode() -> None:
    log = ReceiverLog(on_end=lambda transfer_id, reason: _say(f"ended: {reason}"))
    incarnation = new_incarnation()
    receiver = KVReceiver(LAYOUT, random_memory(NUM_BLOCKS, 1), incarnation, log, SystemClock(), SETTINGS)
    receiver.expect(TRANSFER, 0, range(NUM_BLOCKS), range(NUM_BLOCKS), NUM_TOKENS, 60.0)
    endpoint, server_key = receiver.ctrl_endpoint, receiver.server_key
    _say(KVPeer(worker_id="decode-0", ctrl_endpoint=endpoint, incarnation=incarnation, server_key=server_key).model_dump_json())
    sys.stdin.readline()


def run_prefill(peer: KVPeer) -> None:
    log = SenderLog(on_end=lambda transfer_id, reason: _say(f"ended: {reason}"))
    sender = KVSender(LAYOUT, random_memory(NUM_BLOCKS, 0), new_incarnation(), log, SystemClock(), SETTINGS, "prefill-0")
    sender.offer(TRANSFER, 0, [peer], NUM_TOKENS, [], 60.0)
    sender.send_blocks(TRANSFER, [(index, index) for index in range(NUM_BLOCKS // 2)])
    while not log.granted:
        log.changed.wait(0.01)
    _say("half")
    sys.stdin.readline()
    sender.send_blocks(TRANSFER, [(index, index) for index in range(NUM_BLOCKS // 2, NUM_BLOCKS)])
    sender.commit(TRANSFER, b"hidden", 0)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        run_decode()
    else:
        run_prefill(KVPeer.model_validate_json(sys.argv[2]))
