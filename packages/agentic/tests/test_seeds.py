import hashlib

from agentic import derive_seed
from hypothesis import given
from hypothesis import strategies as st

parts = st.lists(st.one_of(st.integers(), st.text()), max_size=4)


def test_seeds_never_change():
    assert derive_seed(0) == 0xE89C839F84044E5F
    assert derive_seed(7, 3, 1) == 0x29F713580BFC5040
    assert derive_seed(7, "calculator", 0) == 0xB3AAD90A0EE0F3AE


def test_a_seed_is_the_documented_hash():
    text = b"i\x01\x00\x00\x007" + b"s\x04\x00\x00\x00turn" + b"i\x02\x00\x00\x00-1"
    assert derive_seed(7, "turn", -1) == int.from_bytes(
        hashlib.blake2b(text, digest_size=8).digest(), "little"
    )


@given(st.integers(), parts, st.integers(), parts)
def test_different_uses_have_different_seeds(seed, first, other, second):
    # An encoding that is injective leaves only 64-bit collisions, which no test will meet.
    same_types = [(type(part), part) for part in first] == [(type(part), part) for part in second]
    assert (derive_seed(seed, *first) == derive_seed(other, *second)) == (seed == other and same_types)


@given(st.integers(), parts)
def test_a_seed_fits_64_bits(seed, uses):
    assert 0 <= derive_seed(seed, *uses) < 2**64


def test_where_a_part_ends_matters():
    assert len({derive_seed(0, "a", "bc"), derive_seed(0, "ab", "c"), derive_seed(0, "abc")}) == 3
    assert derive_seed(0, 1) != derive_seed(0, "1")
