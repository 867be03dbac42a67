"""Farthest-first centers, reference and kernel alike; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.ops.farthest_first import SLACK, Centers, Tiles, reference, widest_tile
from tests.ops.formula import needs_triton, poison

Choose = Callable[..., Centers]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning:triton")


@pytest.fixture(params=["reference", pytest.param("kernel", marks=needs_triton)])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Farthest-first by one implementation, whose new buffers hold NaN until they are written."""
    implementation: Any = reference
    if request.param == "kernel":
        from kvsketch.ops.farthest_first import kernel as implementation

        monkeypatch.setattr(implementation, "CHECK", 1)

    def chosen(keys: Tensor, count: int, valid: Tensor | None = None, given: int = 1, form: str = "exact") -> Centers:
        valid = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device) if valid is None else valid
        with monkeypatch.context() as patch:
            poison(patch, -(2**30))
            return implementation.farthest_first(keys, count, valid, given, form)

    return chosen


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clusters(count: int, centers: int, size: int = 16, spread: float = 0.05, seed: int = 0) -> tuple[Tensor, float]:
    """Keys [1, 1, count, size] around far centers, in random order, and the radius that those centers reach."""
    middle = 5 * normal(centers, size, seed=seed)
    label = torch.randint(centers, (count,), generator=torch.Generator().manual_seed(seed + 1))
    keys = middle[label] + spread * normal(count, size, seed=seed + 2)
    return keys[None, None], float((keys - middle[label]).norm(dim=-1).max())


def greedy(keys: Tensor, count: int, valid: Tensor | None = None, given: int = 1) -> Tensor:
    """The definition, one head and one center at a time, by differences in float64."""
    rows = []
    for head in range(keys.shape[1]):
        points = keys[0, head].double()
        alive = torch.ones(len(points), dtype=torch.bool) if valid is None else valid[0, head].cpu()
        chosen = alive.nonzero()[:given, 0].tolist()[:count]
        while len(chosen) < min(count, int(alive.sum())):
            distance = torch.cdist(points, points[chosen]).amin(-1).cpu()
            distance[chosen] = -1.0
            chosen.append(int(distance.masked_fill(~alive, -1.0).argmax()))
        rows.append(chosen + [-1] * (count - len(chosen)))
    return torch.tensor(rows)[None]


def insertion_distances(keys: Tensor, index: Tensor) -> Tensor:
    """How far each center of one head was from those before it, without the first."""
    points = keys[0, 0].double()[index[0, 0]]
    return torch.stack([torch.cdist(points[i : i + 1], points[:i]).amin() for i in range(1, len(points))])


def radius(keys: Tensor, index: Tensor) -> float:
    points = keys[0, 0].double()
    return float(torch.cdist(points, points[index[0, 0]]).amin(-1).max())


SHAPES = [  # keys, size, count, given, dtype
    (1, 16, 1, 1, torch.float32),
    (63, 20, 20, 1, torch.float32),
    (40, 64, 40, 3, torch.float32),
    (100, 80, 20, 1, torch.float16),
    (130, 128, 20, 2, torch.bfloat16),
    (200, 16, 4, 1, torch.bfloat16),
]


@pytest.mark.parametrize(("length", "size", "count", "given", "dtype"), SHAPES)
def test_exact_is_the_greedy_choice(
    choose: Choose, device: torch.device, length: int, size: int, count: int, given: int, dtype: torch.dtype
) -> None:
    keys = normal(1, 2, length, size).to(dtype)
    result = choose(keys.to(device), count, given=given)
    assert result.index.cpu().equal(greedy(keys, count, given=given))
    expected = radius(keys[:, :1], result.index[:, :1].cpu())
    assert float(result.radius[0, 0]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("length", "count", "spread"), [(63, 20, 0.3), (150, 20, 1.0)])
def test_exact_on_clustered_keys(choose: Choose, device: torch.device, length: int, count: int, spread: float) -> None:
    keys, _ = clusters(length, 8, spread=spread)
    assert choose(keys.to(device), count).index.cpu().equal(greedy(keys, count))


@needs_triton
@pytest.mark.parametrize(
    ("length", "count", "dtype"), [(63, 20, torch.float32), (40, 40, torch.bfloat16), (120, 15, torch.float32)]
)
def test_coarse_is_the_same_in_kernel_and_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, length: int, count: int, dtype: torch.dtype
) -> None:
    from kvsketch.ops.farthest_first import kernel

    monkeypatch.setattr(kernel, "CHECK", 1)
    keys = normal(1, 2, length, 32).to(device, dtype)
    valid = torch.ones(1, 2, length, dtype=torch.bool, device=device)
    valid[:, 1, ::3] = False
    ours, expected = (m.farthest_first(keys, count, valid, 1, "coarse") for m in (kernel, reference))
    assert ours.index.equal(expected.index)
    torch.testing.assert_close(ours.radius, expected.radius, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_radius_is_near_the_planted_one(choose: Choose, device: torch.device, form: str) -> None:
    """At most twice the best radius, so at most twice the planted one; 2 / SLACK times for the coarse form."""
    bound = 2.0 if form == "exact" else 2.0 / SLACK
    for seed in range(2):
        keys, planted = clusters(120, 8, seed=seed)
        result = choose(keys.to(device), 8, form=form)
        assert float(result.radius) <= bound * planted
        assert radius(keys, result.index.cpu()) == pytest.approx(float(result.radius), rel=1e-3)
        # The bound has teeth: the first eight tokens miss whole clusters.
        assert radius(keys, torch.arange(8)[None, None]) > bound * planted


def test_insertion_distances_never_grow_and_no_center_comes_twice(choose: Choose, device: torch.device) -> None:
    keys = normal(1, 1, 70, 8)
    index = choose(keys.to(device), 40).index.cpu()
    assert len(set(index.flatten().tolist())) == 40
    assert (insertion_distances(keys, index).diff() <= 1e-6).all()
    shuffled = index[..., torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    assert not (insertion_distances(keys, shuffled).diff() <= 1e-6).all(), "the check must reject another order"


def test_coarse_centers_keep_apart(choose: Choose, device: torch.device) -> None:
    """Every center was at least SLACK times the radius of its time from the others, hence of the final radius."""
    keys = normal(1, 1, 100, 16)
    result = choose(keys.to(device), 25, form="coarse")
    assert insertion_distances(keys, result.index.cpu()).min() >= SLACK * float(result.radius) * (1 - 1e-5)
    exact = choose(keys.to(device), 25)
    assert float(result.radius) <= 1.1 * float(exact.radius)
    first = torch.arange(25)[None, None]
    assert insertion_distances(keys, first).min() < SLACK * radius(keys, first), (
        "the check must reject the first tokens"
    )


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_an_isolated_key_is_found_at_once(choose: Choose, device: torch.device, form: str) -> None:
    keys, _ = clusters(100, 4)
    keys[0, 0, 57] += 100.0
    assert choose(keys.to(device), 5, form=form).index[0, 0, 1] == 57


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_fewer_centers_are_the_first_of_more(choose: Choose, device: torch.device, form: str) -> None:
    keys = normal(1, 1, 100, 16).to(device)
    assert choose(keys, 9, form=form).index.equal(choose(keys, 17, form=form).index[..., :9])


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_only_valid_keys_take_part(choose: Choose, device: torch.device, form: str) -> None:
    """Each row is its own: hidden keys far away change nothing, and a row that runs out of keys ends with -1."""
    keys = normal(2, 1, 90, 16)
    valid = torch.zeros(2, 1, 90, dtype=torch.bool)
    valid[0, 0, 20:85] = True
    valid[1, 0, 75:85] = True
    far = torch.where(valid.unsqueeze(-1), keys, 1e3)
    result = choose(far.to(device), 20, valid.to(device), form=form)
    for row, (start, end) in enumerate([(20, 85), (75, 85)]):
        own_keys, own_valid = (part[row : row + 1, :, start:].contiguous().to(device) for part in (keys, valid))
        alone = choose(own_keys, 20, own_valid, form=form)
        assert result.index[row, 0].equal(torch.where(alone.index >= 0, alone.index + start, -1)[0, 0])
        chosen = result.index[row, 0][result.index[row, 0] >= 0]
        assert len(chosen) == min(20, end - start)
        assert bool(((chosen >= start) & (chosen < end)).all())
    assert float(result.radius[1, 0]) == 0.0


@pytest.mark.parametrize("form", ["exact", "coarse"])
def test_equal_keys_have_distance_zero_and_fill_up_in_order(choose: Choose, device: torch.device, form: str) -> None:
    different = 3 * normal(5, 128)
    label = torch.tensor([3, 1, 3, 0, 1, 4, 2, 2, 0, 3])
    keys = different[label][None, None].bfloat16().to(device)
    result = choose(keys, 8, form=form)
    index = result.index.flatten().tolist()
    assert index[0] == 0 and sorted(index[:5]) == [0, 1, 3, 5, 6], "one of each, the lowest"
    assert index[5:] == [2, 4, 7], "then the lowest of the rest"
    assert float(result.radius) == 0.0
    assert sorted(choose(keys, 10, form=form).index.flatten().tolist()) == list(range(10))


def test_strided_keys_and_the_public_call(device: torch.device) -> None:
    buffer = normal(1, 2, 80, 16).to(device)
    view = buffer[:, :, :50]
    result = ops.farthest_first(view, 12)
    assert result.index.cpu().equal(greedy(view, 12))
    assert result.index.equal(ops.farthest_first(view.contiguous(), 12).index)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 2048, 2049, 5000, 32768, 131072])
def test_tiles_cover_the_keys(length: int) -> None:
    size = widest_tile(length)
    assert -(-length // size) <= 64 and size & (size - 1) == 0
    assert size == 32 or -(-length // (size // 2)) > 64, "no wider than needed"
    valid = torch.zeros(1, 2, length + 100, dtype=torch.bool)
    valid[:, 0] = True
    valid[:, 1, 100:] = True
    tiles = Tiles.of(valid)
    assert tiles.origin.tolist() == [[0, 100]]
    assert tiles.width.tolist() == [[widest_tile(length + 100), size]]


def test_wrong_arguments_say_what_is_wrong() -> None:
    keys = normal(1, 2, 10, 8)
    with pytest.raises(ValueError, match=r"keys must be \[batch, heads, keys, size\], got \[2, 10, 8\]"):
        ops.farthest_first(keys[0], 3)
    with pytest.raises(ValueError, match=r"valid must be bool \[1, 2, 10\]"):
        ops.farthest_first(keys, 3, valid=torch.ones(1, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="form='fast' is not one of exact, coarse"):
        ops.farthest_first(keys, 3, form="fast")
    with pytest.raises(ValueError, match="given=0"):
        ops.farthest_first(keys, 3, given=0)
    with pytest.raises(ValueError, match="int64"):
        ops.farthest_first(keys.long(), 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_prompts_on_a_gpu(dtype: torch.dtype) -> None:
    """Sums are added in another order, so that keys that are equally far may change places; few are."""
    keys = normal(1, 8, 8192, 128).to("cuda", dtype)
    ours = ops.farthest_first(keys, 512)
    valid = torch.ones(keys.shape[:3], dtype=torch.bool, device="cuda")
    expected = reference.farthest_first(keys, 512, valid, 1, "exact")
    torch.testing.assert_close(ours.radius, expected.radius, atol=0, rtol=1e-2)
    chosen = [torch.zeros_like(valid).scatter_(2, result.index, True) for result in (ours, expected)]
    assert float((chosen[0] & chosen[1]).sum() / chosen[1].sum()) > 0.9
    coarse = ops.farthest_first(keys, 512, form="coarse")
    assert bool((coarse.radius <= 1.05 * expected.radius).all())
