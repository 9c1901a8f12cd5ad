import pytest
from kv_transfer_pairs import LAYOUT

from shared.errors import ConfigurationError


def test_block_is_the_product_of_its_shape():
    assert LAYOUT.layer_nbytes == 2 * 2 * 4 * 16 * 4
    assert LAYOUT.block_nbytes == 6 * LAYOUT.layer_nbytes


def test_first_difference_names_the_field():
    assert LAYOUT.first_difference(LAYOUT.model_copy()) is None
    assert LAYOUT.first_difference(LAYOUT.model_copy(update={"num_kv_heads": 3})) == ("num_kv_heads", 2, 3)


def test_block_larger_than_a_chunk_is_cut_between_layers():
    assert LAYOUT.layer_ranges(LAYOUT.block_nbytes) == [(0, 6)]
    assert LAYOUT.layer_ranges(4 * LAYOUT.layer_nbytes + 1) == [(0, 4), (4, 2)]
    with pytest.raises(ConfigurationError, match="kv_max_chunk_bytes"):
        LAYOUT.layer_ranges(LAYOUT.layer_nbytes - 1)


def test_last_block_holds_the_rest_of_the_prompt():
    assert [LAYOUT.valid_tokens(index, 9) for index in range(3)] == [4, 4, 1]
    assert LAYOUT.num_blocks(9) == 3
