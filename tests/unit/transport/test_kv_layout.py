import pytest
from kv_transfer_pairs import LAYOUT
from pydantic import ValidationError

from shared.errors import ConfigurationError
from shared.transport.protocol.kv_layout import head_range


def test_block_is_the_product_of_its_shape():
    assert LAYOUT.layer_nbytes == 2 * 2 * 4 * 16 * 4
    assert LAYOUT.block_nbytes == 6 * LAYOUT.layer_nbytes


def test_a_rank_holds_its_share_of_the_heads_and_a_block_only_those():
    ranks = [LAYOUT.model_copy(update={"num_kv_heads": 8, "tp_rank": rank, "tp_size": 4}) for rank in range(4)]
    assert [rank.heads for rank in ranks] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert ranks[1].layer_nbytes == LAYOUT.layer_nbytes


def test_ranks_beyond_the_number_of_heads_hold_the_same_ones():
    assert [head_range(2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("changes", "message"), [({"tp_rank": 2, "tp_size": 2}, "not below"), ({"tp_size": 3}, "shared evenly")])
def test_ranks_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        type(LAYOUT)(**{**LAYOUT.model_dump(), **changes})


def test_a_layer_larger_than_a_chunk_says_what_to_raise():
    LAYOUT.check_chunk(LAYOUT.layer_nbytes)
    with pytest.raises(ConfigurationError, match="kv_max_chunk_bytes"):
        LAYOUT.check_chunk(LAYOUT.layer_nbytes - 1)


def test_last_block_holds_the_rest_of_the_prompt():
    assert LAYOUT.num_blocks(9) == 3
