"""Where blocks begin and end, and what their hashes depend on."""

import tracemalloc

import pytest

from prefixroute.core.blocks import BYTES_PER_TOKEN, BlockHasher

SEED = 0x1234_5678_9ABC_DEF0
SCOPE = b'["m",null,null,null]'
HASHER = BlockHasher(16, SEED)
BLOCK = 16 * BYTES_PER_TOKEN


def material(n_bytes: int) -> bytes:
    return bytes(i * 31 % 251 for i in range(n_bytes))


@pytest.mark.parametrize(
    ("n_bytes", "n_blocks"),
    [
        (0, 0),
        (1, 0),
        (BLOCK - 1, 0),
        (BLOCK, 1),
        (BLOCK + 1, 1),
        (2 * BLOCK - 1, 1),
        (2 * BLOCK, 2),
        (100 * BLOCK, 100),
    ],
)
def test_only_full_blocks_have_a_hash(n_bytes: int, n_blocks: int) -> None:
    assert len(HASHER.chain(SCOPE, material(n_bytes))) == n_blocks


def test_a_rest_shorter_than_a_block_does_not_matter() -> None:
    assert HASHER.chain(SCOPE, material(BLOCK)) == HASHER.chain(SCOPE, material(BLOCK) + b"another rest")


def test_a_block_is_as_many_tokens_as_asked_for() -> None:
    assert len(BlockHasher(256, SEED).chain(SCOPE, material(256 * 4 * 3))) == 3
    assert len(BlockHasher(1, SEED).chain(SCOPE, material(12))) == 3


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_a_block_without_tokens_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockHasher(block_tokens, SEED)


def test_hashes_are_64_bits_and_all_differ() -> None:
    chain = HASHER.chain(SCOPE, bytes(1000 * BLOCK))  # equal blocks, different parents
    assert len(set(chain)) == 1000
    assert all(0 <= block < 2**64 for block in chain)


def test_equal_seeds_speak_of_the_same_blocks() -> None:
    assert BlockHasher(16, SEED).chain(SCOPE, material(500)) == HASHER.chain(SCOPE, material(500))


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_every_64_bit_seed_can_be_used(seed: int) -> None:
    assert len(BlockHasher(16, seed).chain(SCOPE, material(BLOCK))) == 1


def test_what_is_remembered_of_long_prompts_is_bounded() -> None:
    hasher = BlockHasher(1, SEED)
    tracemalloc.start()
    try:
        # Each has three strides: after some hundred of them new ones take the room of old ones.
        used_bytes = []
        for batch in range(4):
            for n in range(400):
                hasher.chain(SCOPE, (batch * 400 + n).to_bytes(4) * 100)
            used_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(used_bytes) < 1.1 * used_bytes[0] < 3_000_000
