"""Every address has a stream of its own, the same on every machine, whatever the global state."""

import numpy as np
import pytest
import torch

from polyclinic import randomness
from polyclinic.randomness import device_rng, numpy_rng, seed_generator, seed_of, seeded, torch_rng

CPU = torch.device("cpu")


def numbers(rng: torch.Generator | np.random.Generator, count: int = 4) -> list[int]:
    if isinstance(rng, torch.Generator):
        return torch.randint(2**62, (count,), generator=rng).tolist()
    return rng.integers(2**62, size=count).tolist()


def test_addresses_draw_what_they_drew_and_do_not_run_together():
    address = (0, "site-1", "batches", 1)
    assert seed_of(*address) == 1323002758928217176
    assert numbers(torch_rng(*address), 2) == [63501525907259999, 4134317757524365035]
    assert numbers(numpy_rng(*address), 2) == [1053145969953559404, 1670557255236428994]
    assert torch_rng(*address).initial_seed() == seed_of(*address)
    addresses = [("a", "b"), ("ab",), ("a", "b", ""), (1, "b"), ("1", "b"), ("a", 11), ("a1", 1)]
    assert len({tuple(numbers(torch_rng(*address))) for address in addresses}) == len(addresses)
    assert len({tuple(numbers(numpy_rng(*address))) for address in addresses}) == len(addresses)
    one, other = colliding_addresses()
    assert seed_of(*one) != seed_of(*other)
    by_seed = [torch.Generator().manual_seed(seed_of(*address)) for address in (one, other)]
    assert numbers(by_seed[0]) == numbers(by_seed[1])  # what is to be avoided
    for make in (torch_rng, numpy_rng, lambda *address: device_rng(CPU, *address)):
        assert not set(numbers(make(*one))) & set(numbers(make(*other)))


def colliding_addresses() -> list[tuple]:
    """Addresses whose seeds differ, but not in the 32 bits that torch's generator on the CPU takes."""
    seen: dict[int, tuple] = {}
    for number in range(200_000):
        address = (0, "site-1", "batches", number)
        found = seen.setdefault(seed_of(*address) % 2**32, address)
        if found != address:
            return [found, address]
    raise AssertionError("no pair among 200,000 addresses")


def initialised(seed: int) -> np.ndarray:
    """The words with which mt19937 begins, by its own recurrence (Matsumoto and Nishimura 2002), [624]."""
    words = [seed]
    for i in range(1, 624):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + i) % 2**32)
    return np.array(words, np.uint64)


def test_torch_keeps_its_state_where_it_is_written():
    seed = 2**40 + 5489
    state = torch.Generator().manual_seed(seed).get_state().numpy()
    assert state.shape == (randomness.STATE_BYTES,)
    assert state[:8].view(np.uint64) == seed
    assert state[8:16].view(np.int32).tolist() == [1, 1]  # the words are mixed at the first draw; it is seeded
    assert state[16:24].view(np.uint64) == 0
    end = randomness.WORDS_AT + 8 * randomness.WORDS
    np.testing.assert_array_equal(state[randomness.WORDS_AT : end].view(np.uint64), initialised(5489))
    assert not state[end:].any()  # no normal number is kept for later


def test_words_of_mt19937_written_so_draw_as_mt19937_does():
    """NumPy's MT19937 with the same words gives the same 32-bit numbers."""
    rng = torch_rng("words")
    words = rng.get_state().numpy()[randomness.WORDS_AT :][: 8 * randomness.WORDS].view(np.uint64)
    assert words.max() < 2**32
    assert len(set(words.tolist())) == randomness.WORDS
    other = np.random.MT19937()
    other.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": 624}}
    drawn = torch.randint(2**32, (2000,), generator=rng, dtype=torch.int64)
    # torch takes two words for such a range, the second for the low bits
    np.testing.assert_array_equal(drawn.numpy(), other.random_raw(4000)[1::2])


def test_a_torch_with_another_state_is_refused(monkeypatch):
    monkeypatch.setattr(randomness, "STATE_BYTES", 5000)
    randomness._fresh_state.cache_clear()
    with pytest.raises(RuntimeError, match="5056 bytes instead of 5000; install a version of torch"):
        torch_rng("a")
    randomness._fresh_state.cache_clear()


def test_streams_look_random_and_generators_begin_again():
    """Means over streams, as each address is asked for few numbers: within five standard errors."""
    uniform = torch.stack([torch.rand(8, generator=torch_rng("looks", i)) for i in range(4000)]).double()
    normal = torch.stack([torch.randn(8, generator=torch_rng("looks", i)) for i in range(4000)]).double()
    assert (uniform.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 4000) ** 0.5
    assert normal.mean(0).abs().max() < 5 / 4000**0.5
    assert (normal.var(0) - 1).abs().max() < 5 * (2 / 4000) ** 0.5
    between = torch.corrcoef(uniform.T) - torch.eye(8, dtype=torch.float64)
    assert between.abs().max() < 5 / 4000**0.5
    rng = torch.Generator()
    torch.randn(7, generator=rng)  # leaves a normal number for later
    assert seed_generator(rng, "a") is rng
    assert torch.equal(torch.randn(7, generator=rng), torch.randn(7, generator=torch_rng("a")))


def test_global_draws_are_those_of_the_address_and_the_state_is_put_back():
    before = torch.get_rng_state()
    with seeded("a", 1):
        inside = torch.rand(5)
        with seeded("a", 2):
            assert not torch.equal(torch.rand(5), inside)
    assert torch.equal(inside, torch.rand(5, generator=torch_rng("a", 1)))
    with pytest.raises(ZeroDivisionError), seeded("a"):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
