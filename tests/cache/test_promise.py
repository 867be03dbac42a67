"""A promise of the loss (`rehearse:loss=2%`): what it chooses, what cannot fool it, and that it goes with the cache."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.replay import promise
from kvsketch.cache.replay.probes import Answers, Probes
from kvsketch.decode import shared
from tests.helpers import zoo

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SAID = torch.tensor([[3, 4, 5]])


def read(model: Any, ids: Tensor, method: str) -> CompressedCache:
    cache = CompressedCache(model, method)
    kvsketch.prefill(model, ids, cache, instruction=SAID)
    return cache


Loses = Callable[[int, int, int], float]  # nats by token, of a passage: rung, begin, end
Forgets = Callable[[int, int], bool]  # whether a lookup is lost: rung, its number


def tried(method: str = "rehearse:loss=5%") -> list[Any]:
    return promise.rungs(kvsketch.methods.parse_method(method))


def pretend(monkeypatch: pytest.MonkeyPatch, loses: Loses, forgets: Forgets = lambda *_: False) -> list[Probes]:
    """Caches lose what is told; the full cache answers every lookup. The samples that were asked are returned."""
    asked: list[Probes] = []

    def ask(self: Probes, cache: CompressedCache, *_: Any) -> Answers:
        asked.append(self)
        rungs = tried(str(cache.asked))
        rung = rungs.index(cache.method) if cache.method in rungs else None
        lost = [0.0 if rung is None else loses(rung, *span) for span in self.passages]
        right = [float(rung is None or not forgets(rung, number)) for number in range(len(self.lookups))]
        return Answers(*(torch.tensor([values], dtype=torch.float64) for values in ([-each for each in lost], right)))

    monkeypatch.setattr(Probes, "ask", ask)
    return asked


def kept(cache: CompressedCache) -> int:
    assert cache.promise is not None and cache.promise.kept == str(cache.method)
    return tried(str(cache.asked)).index(cache.method)


@pytest.mark.parametrize("replay", ["virtual", "exact"])
def test_the_first_cache_within_the_promise_is_kept(replay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    rungs = tried(f"rehearse:loss=5%:replay={replay}")
    # The larger the cache, the less it loses, and the eighth rung is the first that is good enough.
    pretend(monkeypatch, lambda rung, *_: max(0.0, 0.045 + 0.01 * (7 - rung)))
    cache = read(model, ids, f"rehearse:loss=5%:replay={replay}")
    assert cache.method == rungs[7] and cache.promise is not None and cache.promise.kept == str(rungs[7])
    assert all(layer.method == rungs[7] for layer in cache.slot_layers)
    sizes = [rung.bytes for rung in cache.promise.curve]
    assert sizes == sorted(sizes) and str(rungs[7]) in [rung.method for rung in cache.promise.curve]
    # The same as with that budget from the beginning.
    other = read(model, ids, str(rungs[7]))
    assert cache.device_bytes == other.device_bytes
    with torch.no_grad():
        both = [model(ids[:, :9], past_key_values=each).logits for each in (cache, other)]
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


def loss(
    passages: list[list[float]], full: list[float] | None = None, small: list[float] | None = None
) -> promise.Loss:
    rows = (passages, [full or [1.0]], [small or full or [1.0]])
    return promise.Loss(*(torch.tensor(each, dtype=torch.float64) for each in rows))


@pytest.mark.parametrize(("spread", "within"), [(0.016, True), (0.019, False)])
def test_a_loss_is_within_the_promise_with_its_standard_error(spread: float, within: bool) -> None:
    """Four passages lose .04 +- spread: .01 below the promise, and the mean's standard error is spread / sqrt(3).

    The deviation is above .01 in both cases.
    """
    lost = loss([[0.04 - spread, 0.04 + spread, 0.04 + spread, 0.04 - spread]])
    assert lost.is_within(0.05, errors=1) == within
    assert lost.is_within(0.05, errors=0)


@pytest.mark.parametrize(
    ("lost", "chooses", "agrees"), [(0, True, True), (1, True, True), (2, False, True), (3, False, False)]
)
def test_lost_lookups_are_within_the_promise_with_their_standard_error(lost: int, chooses: bool, agrees: bool) -> None:
    """Of 48: 1 is 2.1 +- 2.1%, 2 are 4.2 +- 2.9%, 3 are 6.2%."""
    made = loss([[0.0] * 12], [1.0] * 48, [0.0] * lost + [1.0] * (48 - lost))
    assert (made.lost, made.asked) == (lost, 48)
    share, error = made.answers
    assert share == pytest.approx(lost / 48)
    assert error == pytest.approx((share * (1 - share) / 47) ** 0.5, rel=0.02)
    assert (made.is_within(0.05, errors=1), made.is_within(0.05, errors=0)) == (chooses, agrees)


def test_near_ties_that_fall_to_the_other_side_are_no_loss() -> None:
    """Rounding moves answers at .5 a little up and down: half of the greedy answers change, and nothing is lost."""
    made = loss([[0.0] * 12], [0.51] * 48, [0.49, 0.53] * 24)
    assert made.lost == 0 and made.answers[0] == pytest.approx(0) and made.is_within(0.01, errors=1)


def test_a_model_that_finds_nothing_itself_is_not_asked() -> None:
    made = loss([[0.0] * 12], [0.01] * 48, [0.0] * 48)
    assert made.asked == 0 and made.answers == (0.0, 0.0) and made.is_within(0.01, errors=1)


@pytest.mark.parametrize(("bad", "within"), [(1, True), (2, False)])
def test_few_bad_passages_are_not_hidden_by_the_mean(bad: int, within: bool) -> None:
    """Of 12 passages the second worst is the quantile, and it may be twice the promise."""
    lost = loss([[0.2] * bad + [-0.05] * (12 - bad)])
    assert lost.mean < 0
    assert lost.is_within(0.05, errors=0) == within


@pytest.mark.parametrize(
    ("losses", "within"),
    [((0.0, 0.06), True), ((0.02, 0.09), False), ((0.09, 0.02), False), ((-0.3, 0.3), False), ((0.3, -0.3), False)],
)
def test_the_rows_of_a_batch_count_alike(losses: tuple[float, float], within: bool) -> None:
    """In the mean, and in the quantile, which .3 in either row exceeds."""
    assert loss([[each] * 4 for each in losses]).is_within(0.05, errors=1) == within


def test_the_standard_error_of_a_batch_is_that_of_the_means_of_its_rows() -> None:
    """Each row is off by .03 at every passage, both together are not."""
    assert loss([[0.015, 0.075] * 2, [0.075, 0.015] * 2]).is_within(0.05, errors=1)


@pytest.mark.parametrize("row", [0, 1])
def test_lookups_of_every_row_of_a_batch_count(row: int) -> None:
    full, small = torch.ones(2, 8, dtype=torch.float64), torch.ones(2, 8, dtype=torch.float64)
    small[row, :4] = 0.0
    made = promise.Loss(torch.zeros(2, 12, dtype=torch.float64), full, small)
    share, error = made.answers
    assert (made.lost, made.asked, share) == (4, 16, 0.25)
    assert error == pytest.approx((0.25 * 0.75 / 15) ** 0.5)


def test_a_form_that_recurs_where_passages_lay_at_equal_distances_fools_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs nothing lies in 8 equally spaced pieces; between them every small cache loses .95 nats a token."""
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 1000)
    easy = {at for begin in torch.linspace(0, 1000 - 64, 8).long().tolist() for at in range(begin, begin + 64)}

    def loses(rung: int, begin: int, end: int) -> float:
        hard = sum(at not in easy for at in range(begin, end)) / (end - begin)
        return 0.0 if rung >= 8 else 0.95 * hard

    pretend(monkeypatch, loses)
    assert kept(read(model, ids, "rehearse:loss=5%")) == 8


def test_a_text_that_is_said_again_but_not_answered_from_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages lose nothing; a fifth of the lookups is lost below a quarter of the tokens."""
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 1000)
    quarter = promise.SHARES.index("1/4")
    pretend(monkeypatch, lambda *_: 0.0, lambda rung, number: rung < quarter and number % 5 == 0)
    cache = read(model, ids, "rehearse:loss=5%")
    assert kept(cache) == quarter
    assert "0 of 96 lookups lost: at most 3.1% with 95% confidence" in cache.describe()


def test_samples_that_chose_nothing_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample that chooses loses nothing, others lose half up to the sixth rung: two rungs more than its choice."""
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 1000)
    chose: list[Any] = []

    def loses(rung: int, begin: int, end: int) -> float:
        chose[:] = chose or [asked[0].passages]
        return 0.5 if (rung < 6 and (begin, end) not in chose[0]) or rung < 4 else 0.0

    asked = pretend(monkeypatch, loses)
    cache = read(model, ids, "rehearse:loss=5%")
    assert kept(cache) == 6
    # Each sample has places of its own.
    places = {tuple(each.passages) for each in asked}
    assert len(places) == 1 + 3 * promise.CHECKS
    sizes = [rung.method for rung in cache.promise.curve] if cache.promise else []
    assert {str(method) for method in tried()[4:7]} <= set(sizes)


def test_losses_need_not_fall_from_rung_to_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bisection meets a rung that is good by chance below one that is not: what is kept is within the promise."""
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 1000)
    good = {5, 7, 8, 9, 11, 12}
    pretend(monkeypatch, lambda rung, *_: 0.0 if rung in good else 0.5)
    assert kept(read(model, ids, "rehearse:loss=5%")) in good


def test_the_seed_draws_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 1000)
    asked = pretend(monkeypatch, lambda *_: 0.0)
    places = []
    for seed in (0, 0, 1):
        asked.clear()
        kvsketch.prefill(model, ids, CompressedCache(model, "rehearse:loss=5%", seed=seed), instruction=SAID)
        places.append([(each.passages, each.lookups) for each in asked])
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize(
    ("lost", "asked", "expected"), [(0, 59, 0.0495), (0, 96, 0.0307), (2, 96, 0.0641), (96, 96, 1.0)]
)
def test_the_bound_is_that_of_clopper_and_pearson(lost: int, asked: int, expected: float) -> None:
    assert promise.most_lost(lost, asked) == pytest.approx(expected, abs=1e-4)


def test_the_curve_tells_the_bytes_and_the_mean_loss_of_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    asked = pretend(monkeypatch, lambda _, begin, __: 0.02 + 0.0001 * begin)
    cache, full = read(model, ids, "rehearse:loss=5%"), CompressedCache(model, "full")
    kvsketch.prefill(model, ids, full)
    assert cache.promise is not None
    choice, *checks = [[0.02 + 0.0001 * begin for begin, _ in each] for each in {tuple(p.passages): 0 for p in asked}]
    means = [fmean(choice)] * (len(cache.promise.curve) - 1) + [fmean(itertools.chain(*checks))]
    assert sorted(rung.loss for rung in cache.promise.curve) == pytest.approx(sorted(means))
    assert cache.promise.checked is not None and cache.promise.checked.loss == pytest.approx(means[-1])
    assert len(checks) == promise.CHECKS and min(choice) < means[0] - 0.001
    assert all(
        rung.bytes == pytest.approx(cache.device_bytes / full.device_bytes)
        for rung in cache.promise.curve if rung.method == cache.promise.kept
    )  # fmt: skip
    assert 0.9 < cache.promise.probed <= 1


def test_a_text_that_cannot_be_made_small_stays_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    with monkeypatch.context() as context:
        pretend(context, lambda rung, *_: 1.0 if rung < len(tried()) - 1 else 0.0)
        cache = read(model, ids, "rehearse:loss=1%")
    assert str(cache.method) == "rehearse:bits=16:budget=100%"
    assert cache.promise is not None and cache.promise.checked is None
    with torch.no_grad():
        told = model(ids[:, :5], past_key_values=cache).logits
        whole = model(torch.cat([ids, ids[:, :5]], 1)).logits[:, -5:]
    torch.testing.assert_close(told, whole, atol=1e-4, rtol=1e-4)


def test_the_curve_is_saved_told_copied_and_forgotten(tmp_path: Path) -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    cache = read(model, ids, "rehearse:loss=90%")
    assert cache.method.budget.share is not None and float(cache.method.budget.share) == 1 / 32
    assert "limit of the loss 90.0%: rehearse" in cache.describe()
    cache.save(tmp_path / "text.kvs")
    loaded = CompressedCache.load(tmp_path / "text.kvs", model)
    assert loaded.promise == cache.promise == copy.deepcopy(cache).promise
    with torch.no_grad():
        told = [model(ids[:, :9], past_key_values=each).logits for each in (cache, loaded)]
    torch.testing.assert_close(*told, atol=0, rtol=0)
    cache.reset()
    assert cache.promise is None and str(cache.method) == "rehearse:loss=90%"
    kvsketch.prefill(model, ids, cache, instruction=SAID)
    assert cache.promise == loaded.promise


def test_what_cannot_be_promised_says_so_in_one_line() -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    for build, said in (
        (lambda: CompressedCache(model, "rehearse:loss=some"), "loss='some'"),
        (lambda: CompressedCache(model, "rehearse:loss=12"), "a share such as 2%"),
        (lambda: CompressedCache(model, "rehearse:loss=2%:budget=1/4"), "no budget together with loss"),
        (lambda: CompressedCache(model, "rehearse:loss=2%", prefill="stream"), "prefill='exact'"),
        (lambda: CompressedCache(model, "rehearse:loss=2%", memory="1MB"), "leave out memory"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            build()
        assert "\n" not in str(error.value)
    assert "a budget of its own" in str(shared.batched(model, "rehearse:loss=2%").reason)
    cache = CompressedCache(model, "rehearse:loss=2%")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="call cache"):
            model(ids[:, :1], past_key_values=cache)


def test_bits_that_a_prompt_chooses_go_with_a_promise() -> None:
    model, ids = zoo.build("llama", **SIZES), zoo.tokens(1, 200)
    cache = read(model, ids, "rehearse:bits=auto:loss=90%")
    assert cache.method.bits == "auto" and not any(layer.table.stored_bits.auto for layer in cache.slot_layers)
    with torch.no_grad():
        assert model(ids[:, :9], past_key_values=cache).logits.isfinite().all()
