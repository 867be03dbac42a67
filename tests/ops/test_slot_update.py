"""The in-place slot updates: kernels against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvsketch.ops.codec import Codec, CodedSlots, encode
from kvsketch.ops.slot_update import Ranking, Slots, Token, reference
from kvsketch.ops.weighted_attention.call import rows_in
from tests.ops.formula import in_pages, quantised

kernel = pytest.importorskip("kvsketch.ops.slot_update.kernel", reason="needs Triton")


def make_table(device: torch.device, slots: int, dtype: torch.dtype, key_only: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(slots)
    index = torch.stack([torch.randperm(3 * slots, generator=g)[:slots] for _ in range(6)]).view(2, 3, slots).int()
    index[torch.rand(2, 3, slots, generator=g) < 0.1] = -1
    index[1, 2, : slots // 2] = -2
    table = {
        "keys": torch.randn(2, 3, slots, 24, generator=g).to(dtype),
        "values": torch.randn(2, 3, slots - key_only, 40, generator=g).to(dtype),
        "index": index,
        "log_den": torch.randn(2, 3, slots, generator=g),
        "log_num": torch.randn(2, 3, slots, generator=g),
        "next": torch.randint(0, slots - key_only, (2, 3, 1), generator=g),
        "clock": torch.tensor([3 * slots]),
        "padding": torch.tensor([0, slots // 3]),
        "scores": torch.randn(2, 3, slots, generator=g),
    }
    return {name: tensor.to(device) for name, tensor in table.items()}


@pytest.mark.parametrize(("slots", "dtype"), [(1, torch.float32), (100, torch.bfloat16), (2500, torch.float32)])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows_of_one_program", [0, 16])
def test_write_token(
    device: torch.device, slots: int, dtype: torch.dtype, separate: bool, rows_of_one_program: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernel, "ROWS_OF_ONE_PROGRAM", rows_of_one_program)
    results = []
    for module in (reference, kernel):
        t = make_table(device, slots, dtype, key_only=slots // 4)
        new_key = torch.arange(2 * 3 * 24, device=device).view(2, 1, 3, 24).transpose(1, 2).to(dtype)
        new_value = torch.arange(2 * 3 * 40, device=device).view(2, 3, 1, 40).to(dtype)
        log_num = t["log_num"] if separate else None
        token = Token(new_key, new_value, t["next"], t["clock"])
        scores = t["scores"] if separate else None
        module.write_token(t["keys"], t["values"], Slots(t["index"], t["log_den"], log_num), token, scores)
        results.append(t)
    if separate:
        assert (results[0]["scores"].gather(2, results[0]["next"]) == 0).all()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    written = results[0]["index"].gather(2, results[0]["next"])
    assert (written == 3 * slots).all() and results[0]["clock"].item() == 3 * slots + 1


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
@pytest.mark.parametrize(("bits", "value_bits", "flat"), [(4, 3, False), (8, 4, True)])
def test_write_coded_token(device: torch.device, bits: int, value_bits: int, flat: bool) -> None:
    start = torch.tensor([[0, 9, 12], [30, 33, 40]], device=device)
    results = []
    for module in (reference, kernel):
        g = torch.Generator().manual_seed(0)
        shape = (50,) if flat else (2, 3, 20)
        slot = torch.tensor([[[5], [2], [0]], [[1], [3], [2]]], device=device)
        parts = []
        for each in (bits, value_bits):
            codec = Codec(each, 64)
            exact_at = torch.tensor([5, 1, 2], dtype=torch.int32, device=device).repeat(2, 3, 1)
            codes = torch.randint(0, 256, (*shape, codec.code_bytes), generator=g, dtype=torch.uint8).to(device)
            center, steps = 9 * torch.randn(2, 3, 64, generator=g), torch.rand(shape, generator=g).half()
            exact = torch.zeros(2, 3, 3, 64, device=device)
            parts.append(CodedSlots(codec, center.to(device), exact, exact_at, codes, steps.to(device)))
        index = torch.randint(0, 9, shape, generator=g).int().to(device)
        log_den, log_num, score = (torch.randn(shape, generator=g).to(device) for _ in range(3))
        clock = torch.tensor([77], device=device)
        # One vector is not finite: its step says so.
        key, value = (9 * torch.randn(2, 1, 3, 64, generator=g).transpose(1, 2).bfloat16() for _ in range(2))
        key[1, 1, 0, 3] = float("inf")
        token = Token(key.to(device), value.to(device), slot, clock, start if flat else None)
        module.write_token(*parts, Slots(index, log_den, log_num), token, score)
        held = [t for part in parts for t in (part.codes, part.steps, part.exact_at)]
        results.append([*held, index, log_den, log_num, score, clock])
    for result, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    codes, steps, exact_at, *_, index, log_den, _, score, clock = results[0]
    assert int((index == 77).sum()) == 6 and clock.item() == 78 and int(steps.isnan().sum()) == 1
    assert exact_at[:, :, 0].tolist() == [[-1, 5, 5], [5, 5, 5]]


def test_a_token_goes_to_the_page_of_its_row(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(5, 3 * 20 * 24 + 3 * 20 * 40 + 7, generator=g)
    pages = torch.tensor([4, -1], device=device)
    results = []
    for module in (reference, kernel):
        t, mine = make_table(device, 20, torch.float32), pool.clone().to(device)
        keys, values = mine[:, :1440].unflatten(1, (3, 20, 24)), mine[:, 1440:3840].unflatten(1, (3, 20, 40))
        new = torch.randn(2, 3, 1, 64, generator=torch.Generator().manual_seed(1)).to(device)
        token = Token(new[..., :24], new[..., 24:], t["next"], t["clock"], None, pages)
        module.write_token(keys, values, Slots(t["index"], t["log_den"], None), token, t["scores"])
        results.append([mine, t["index"], t["log_den"], t["scores"], t["clock"]])
    assert all(torch.equal(wanted, result) for wanted, result in zip(*results, strict=True))
    mine = results[0][0].cpu()
    assert torch.equal(mine[:4], pool[:4]) and (mine[4] != pool[4]).sum() == 3 * 64


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")
@pytest.mark.parametrize(("bits", "value_bits"), [(4, 4), (8, 3), (4, 16)])
def test_a_coded_token_goes_to_the_page_of_its_row(device: torch.device, bits: int, value_bits: int) -> None:
    """What it writes there is what it writes row by row; rows of nobody, and other pages, keep what they hold."""
    g = torch.Generator().manual_seed(0)
    x = [(9 + torch.randn(2, 3, 20, 32, generator=g)).bfloat16().to(device) for _ in range(2)]
    parts = [quantised(part, b) for part, b in zip(x, (bits, value_bits), strict=True)]
    new = [(9 + torch.randn(3, 3, 1, 32, generator=g)).bfloat16().to(device) for _ in range(2)]
    pages = torch.tensor([4, -1, 2], device=device)
    pools = []
    for module in (reference, kernel):
        if module is kernel and value_bits == 16:
            assert not kernel.supported(*parts)
            continue
        t = make_table(device, 20, torch.float32)
        slot = torch.tensor([[[7], [0], [14]]] * 3, device=device)
        rows = [torch.zeros(3, 3, 20, dtype=dtype, device=device) for dtype in (torch.int32, *[torch.float32] * 2)]
        pool, held = in_pages(parts, [4, 2], 5)
        before, clock = pool.clone(), t["clock"].clone()
        module.write_token(*held, Slots(*rows[:2], None), Token(*new, slot, clock, None, pages), rows[2])
        assert clock == t["clock"] + 1 and (rows[0].gather(2, slot)[[0, 2]] == t["clock"]).all()
        assert torch.equal(before[[0, 1, 3]], pool[[0, 1, 3]]), "a page of nobody was written"
        for row, page in ((0, 4), (2, 2)):
            for stored, vector in zip(held, new, strict=True):
                if isinstance(stored, torch.Tensor):
                    assert torch.equal(stored[page].gather(1, slot[row].unsqueeze(-1).expand(-1, 1, 32)), vector[row])
                    continue
                alone = rows_in(stored, torch.tensor([page], device=device))
                wanted = encode(vector[row : row + 1], alone.center, alone.codec)
                at = slot[row : row + 1].unsqueeze(-1).expand(-1, -1, 1, alone.codes.shape[3])
                assert torch.equal(alone.codes.gather(2, at), wanted.codes)
                assert torch.equal(alone.steps.gather(2, slot[row : row + 1]), wanted.steps)
                assert not (alone.exact_at == slot[row : row + 1]).any()
        pools.append(pool)
    assert all(torch.equal(pool, pools[0]) for pool in pools)


@pytest.mark.parametrize("slots", [1, 100, 2500])
@pytest.mark.parametrize(("scored", "padded"), [(False, False), (True, False), (True, True)])
def test_free_lowest(device: torch.device, slots: int, scored: bool, padded: bool) -> None:
    for full in (False, True):
        results = []
        for module in (reference, kernel):
            t = make_table(device, slots, torch.float32)
            if full:
                t["index"][t["index"] == -1] = slots
            scores, padding = (t["scores"] if scored else None), (t["padding"] if padded else None)
            slots_of_t = Slots(t["index"], t["log_den"], t["log_num"])
            module.free_lowest(slots_of_t, Ranking(scores, padding, t["clock"], 2, 5), t["next"])
            results.append(t)
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
        freed = results[0]["index"].gather(2, results[0]["next"])
        assert (freed == -1).all() and results[0]["log_den"].gather(2, results[0]["next"]).isneginf().all()


def test_sinks_outrank_recent_tokens_outrank_scores() -> None:
    index = torch.tensor([[[0, 1, 5, 8, 9, -1]]], dtype=torch.int32)
    ranked = reference.rank(torch.tensor([[[0.0, 0.0, 3e38, 0.0, -3e38, 9.0]]]), index, None, torch.tensor([10]), 2, 2)
    order = ranked[0, 0].argsort(descending=True).tolist()
    assert order[:2] in ([0, 1], [1, 0]) and order[2:] == [4, 3, 2, 5]


@pytest.mark.parametrize("slots", [100, 2500])
@pytest.mark.parametrize("padded", [False, True])
def test_of_equal_scores_the_oldest_goes_first(device: torch.device, slots: int, padded: bool) -> None:
    """Whatever slot it lies in: the order of slots differs between a row alone and that row in a batch."""
    results = []
    for module in (reference, kernel):
        t = make_table(device, slots, torch.float32)
        t["index"][t["index"] < 2 + slots // 3] = 3 * slots - 1
        t["index"][:, :, -1] = 2 + slots // 3  # the oldest lies in the last slot
        t["scores"] = t["scores"].gt(0).float() * torch.tensor(-0.0, device=device)
        t["scores"][:, :, ::7] = 0.0
        padding = t["padding"] if padded else None
        index = t["index"].clone()
        ranking = Ranking(t["scores"], padding, t["clock"], 2, 5)
        module.free_lowest(Slots(t["index"], t["log_den"], None), ranking, t["next"])
        start = torch.zeros(2, device=device) if padding is None else padding
        real = index.long() - start.view(-1, 1, 1)
        oldest = torch.where(real >= 2, index, 10 * slots).amin(-1, keepdim=True)
        oldest = torch.where((real < 0).any(-1, keepdim=True), index.gather(2, t["next"]), oldest)
        assert torch.equal(index.gather(2, t["next"]), oldest)
        results.append(t)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_keys_sort_by_rank_then_by_age() -> None:
    ranked = torch.tensor([[[float("-inf"), -3.5, -0.0, 0.0, 1e-40, 2.0, 2.0, float("inf")]]])
    index = torch.tensor([[[-1, 9, 4, 3, 2, 8, 7, 0]]])
    assert reference.sort_keys(ranked, index)[0, 0].argsort().tolist() == [0, 1, 3, 2, 4, 6, 5, 7]
