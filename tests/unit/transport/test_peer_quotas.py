"""What one peer may cost another, and all others."""

import pytest
from kv_transfer_pairs import LAYOUT, SETTINGS, TRANSFER, MemoryPair, ReceiverLog

from shared.messages import KVPeer
from shared.transport.protocol import control
from shared.transport.protocol.limits import CONTROL_BURST, MAX_CONTROL_QUOTAS, MAX_PEERS, MAX_WAITING_OFFERS_PER_PEER
from shared.transport.receiving.control_quotas import ControlQuotas
from shared.transport.receiving.peer_table import LaneAddresses
from shared.transport.receiving.receiver_state import ReceiverState
from shared.transport.simulated_network import BytesMemory, MemoryReceiverWire


def _hello(incarnation: int) -> control.Hello:
    return control.Hello(
        src_incarnation=incarnation, dst_incarnation=22, worker_id="p", layout=LAYOUT, num_lanes=2, max_chunk_bytes=1 << 20
    )


def _offer(number: int, incarnation: int) -> control.Offer:
    return control.Offer(
        transfer_id=f"{number:032x}", src_incarnation=incarnation, dst_incarnation=22, num_prompt_tokens=4, block_hashes="", deadline_s=60.0
    )


def test_a_peer_that_floods_is_not_listened_to_and_others_are():
    pair = MemoryPair()
    pair.receiver.on_control("flood>decode-0", _hello(77))
    for _ in range(2 * CONTROL_BURST):
        pair.receiver.on_control("flood>decode-0", control.Renew(src_incarnation=77, dst_incarnation=22))
    assert pair.receiver.counters()["control_throttled"] >= CONTROL_BURST - 1
    pair.offer(16)
    pair.expect(16, [0, 1])
    pair.send_all(16)
    pair.run()
    assert pair.receiver_log.ended == {TRANSFER: [None]}


def test_a_throttled_peer_is_heard_again_when_it_calms_down():
    pair = MemoryPair()
    pair.receiver.on_control("flood>decode-0", _hello(77))
    for _ in range(CONTROL_BURST + 10):
        pair.receiver.on_control("flood>decode-0", control.Renew(src_incarnation=77, dst_incarnation=22))
    pair.clock.advance(1.0)
    pair.receiver.on_control("flood>decode-0", _offer(1, 77))
    assert pair.receiver.num_transfers == 1


def test_offers_of_one_peer_that_may_wait_are_bounded_and_it_is_told_when_to_try_again():
    pair = MemoryPair()
    denied = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": denied.append(message)
    pair.receiver.on_control("greedy>decode-0", _hello(77))
    for number in range(MAX_WAITING_OFFERS_PER_PEER + 1):
        pair.receiver.on_control("greedy>decode-0", _offer(number, 77))
    assert isinstance(denied[-1], control.Deny)
    assert denied[-1].retry_ms > 0
    assert pair.receiver.num_transfers == MAX_WAITING_OFFERS_PER_PEER
    pair.receiver.on_control("modest>decode-0", _hello(78))
    pair.receiver.on_control("modest>decode-0", _offer(9999, 78))
    assert pair.receiver.num_transfers == MAX_WAITING_OFFERS_PER_PEER + 1


def test_the_number_of_connected_peers_is_bounded():
    pair = MemoryPair()
    answers = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": answers.append(message)
    for number in range(MAX_PEERS + 1):
        pair.receiver.on_control(f"p{number}>decode-0", _hello(100 + number))
    assert isinstance(answers[-1], control.Deny)
    assert len(pair.receiver.peers()) == MAX_PEERS


def test_a_peer_that_takes_nothing_leaves_staging_memory_to_the_others():
    """With a slot for each chunk on the way to one slow peer, lanes to all the others would wait in `read` until they fail."""
    pair = MemoryPair(num_blocks=64, settings=SETTINGS.model_copy(update={"kv_credits": 64}))
    pair.source.max_chunks_held = 8
    pair.network.add_receiver("decode-1", ReceiverState(
        layout=LAYOUT, memory=BytesMemory(16, LAYOUT), incarnation=33, events=(log := ReceiverLog()), clock=pair.clock, settings=SETTINGS,
        wire=MemoryReceiverWire(pair.network), lanes=LaneAddresses(("lane-0", "lane-1")),
    ))  # fmt: skip
    post, peak = pair.network.post_data, 0

    def hold(sender, endpoint, *message):
        nonlocal peak
        peak = max(peak, sum(connection.num_in_flight for connection in pair.sender._connections.values()))
        if endpoint == "decode-1":
            post(sender, endpoint, *message)

    pair.network.post_data = hold
    pair.receiver.expect(TRANSFER, 0, range(16), range(16), 64, 60.0)
    pair.offer(64)
    pair.send_all(64)
    pair.network.run(1.0)
    other = "cd" * 16
    pair.network._receivers["decode-1"].expect(other, 0, range(16), range(16), 64, 60.0)
    pair.sender.offer(other, 0, [KVPeer(worker_id="decode-1", ctrl_endpoint="decode-1", incarnation=33)], 64, [], 60.0, "")
    pair.sender.send_blocks(other, [(index, index) for index in range(16)])
    pair.sender.commit(other, b"", 0)
    pair.network.run(3.0, lambda: other in log.ended)
    assert log.ended == {other: [None]} and TRANSFER not in pair.sender_log.ended
    assert peak <= 8


def _bye(incarnation: int) -> control.Bye:
    return control.Bye(src_incarnation=incarnation, dst_incarnation=22)


def _renew(incarnation: int) -> control.Renew:
    return control.Renew(src_incarnation=incarnation, dst_incarnation=22)


FLOODS = {
    "of many incarnations": lambda number: (_hello, _renew, _renew)[number % 3](77 + number % 2),
    "that begins anew all the time": lambda number: (_hello, _renew, _bye)[number % 3](77),
    "of one who never says HELLO": lambda _number: _renew(77),
    "meant for another process": lambda _number: control.Renew(src_incarnation=77, dst_incarnation=23),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_not_listened_to(flood):
    pair = MemoryPair()
    answers = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": answers.append(message)
    for number in range(2 * CONTROL_BURST):
        pair.receiver.on_control("flood>decode-0", flood(number))
    assert pair.receiver.counters()["control_throttled"] >= CONTROL_BURST - 1
    assert len(answers) <= CONTROL_BURST + 1


def test_a_flood_in_another_version_is_not_answered():
    pair = MemoryPair()
    answers = []
    pair.receiver._wire.send_control = lambda key, message, blob=b"": answers.append(message)
    hello = _hello(77).model_dump() | {"protocol_min": 99, "protocol_max": 99}
    error = control.OtherVersionError(control.Hello.model_construct(**hello))
    for _ in range(CONTROL_BURST + 10):
        pair.receiver.refuse_version("flood>decode-0", error)
    assert len(answers) == CONTROL_BURST


def test_what_is_remembered_of_who_said_how_much_is_bounded_and_those_who_speak_are_not_forgotten():
    quotas = ControlQuotas()
    while quotas.take("flood", 0.0):
        pass
    for number in range(2 * MAX_CONTROL_QUOTAS):
        assert quotas.take(f"p{number}", 0.0)
        assert not quotas.take("flood", 0.0)
    assert len(quotas._left) == MAX_CONTROL_QUOTAS
