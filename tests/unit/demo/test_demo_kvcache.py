from prefixroute.demo.engine.kvcache import BlockPool


def fill(pool: BlockPool, hashes: list[int]) -> list[int]:
    """A request that computes and names a block for each hash, and still holds them."""
    blocks = pool.take(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.name(block, block_hash)
    return blocks


def test_finds_the_longest_cached_prefix_up_to_the_limit() -> None:
    pool = BlockPool(8)
    blocks = fill(pool, [1, 2, 3])

    assert pool.match([1, 2, 3, 4], limit=9) == blocks
    assert pool.match([1, 2, 3, 4], limit=2) == blocks[:2]
    assert pool.match([9, 2, 3], limit=9) == []


def test_blocks_given_back_are_free_and_can_still_be_found() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, [1, 2])
    assert pool.n_free == 2

    pool.give_back(blocks)
    assert pool.n_free == 4
    assert pool.n_cached == 2
    assert pool.match([1, 2], limit=2) == blocks


def test_the_tail_of_a_prompt_is_evicted_before_its_start() -> None:
    pool = BlockPool(3)
    pool.give_back(fill(pool, [1, 2, 3]))

    pool.take(1)
    assert len(pool.match([1, 2, 3], limit=3)) == 2
    pool.take(1)
    assert len(pool.match([1, 2, 3], limit=3)) == 1


def test_the_least_recently_freed_prompt_is_evicted_first() -> None:
    pool = BlockPool(4)
    pool.give_back(fill(pool, [1, 2]))
    pool.give_back(fill(pool, [11, 12]))
    again = pool.match([1, 2], limit=2)
    pool.share(again)
    pool.give_back(again)

    pool.take(2)
    assert len(pool.match([1, 2], limit=2)) == 2
    assert pool.match([11, 12], limit=2) == []


def test_a_shared_block_stays_until_the_last_one_gives_it_back() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, [1])
    pool.share(blocks)

    pool.give_back(blocks)
    assert pool.references(blocks[0]) == 1
    assert pool.n_free == 1
    assert pool.count_free(blocks) == 0

    pool.give_back(blocks)
    assert pool.n_free == 2
    assert pool.count_free(blocks) == 1


def test_a_block_computed_again_takes_over_the_name() -> None:
    pool = BlockPool(2)
    older = fill(pool, [1])
    newer = fill(pool, [1])

    assert pool.match([1], limit=1) == newer
    pool.give_back(older)
    pool.give_back(newer)
    pool.take(1)  # the older copy goes, and its name stays with the newer one
    assert pool.match([1], limit=1) == newer


def test_is_cleared_only_while_nobody_uses_it() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, [1])
    assert not pool.clear()

    pool.give_back(blocks)
    assert pool.clear()
    assert pool.n_cached == 0
    assert pool.match([1], limit=1) == []
