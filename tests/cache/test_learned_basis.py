"""Keys and values rounded along learned directions, under every method, from a fit to a file and back."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvsketch
from kvsketch import CompressedCache, prefill
from kvsketch.cache import learning
from kvsketch.cache.overview import overview
from kvsketch.cache.replay import fitting
from kvsketch.cache.replay.fitting import Learned
from kvsketch.cache.saving import sealed_file
from kvsketch.doubt_threshold import DoubtThreshold
from kvsketch.methods import parse_method
from kvsketch.ops.codec.basis import Bases, LearnedCodec
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.requests import Request
from kvsketch.slots import codes
from kvsketch.slots.codes import SlotCodes
from tests.helpers import zoo
from tests.helpers.common import padded, read_pieces, with_budget

BIG = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
PIECES = [(0, 80), (80, 81), (81, 82), (82, 91), (91, 92)]
FORMS = [
    "full:bits=2:basis=learned",
    "snapkv:key_bits=3:value_bits=2:basis=learned-keys",
    "h2o:bits=3:basis=learned",
    "clusterkv:bits=4:basis=learned",
    "subgen:bits=4:basis=learned",
    "rehearse:refit=none:bits=3:basis=learned",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.build("llama", **BIG)


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    return [zoo.tokens(1, 240, seed=seed) for seed in (20, 21, 22)]


@pytest.fixture(scope="module")
def learned(model: Any, texts: list[Tensor]) -> Learned:
    return learning.learn(model, texts, maps=False)


@pytest.fixture
def home(model: Any, learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of fetched files, with what was learned of the model."""
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    identity = CompressedCache(model).identity.describe()
    fitting.save(fitting.default_path(identity), learned, identity)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "kvsketch: transformers")
        yield tmp_path


def method_of(text: str) -> str:
    return text if text.startswith("full") else with_budget(text, 24)


def codecs_of(cache: CompressedCache) -> list[tuple[Any, Any]]:
    tables = [layer.table for layer in cache.slot_layers]
    return [(table.keys.codec, table.values.codec) for table in tables]  # type: ignore[union-attr]


# what is learned


def test_directions_are_those_of_keys_and_values_around_their_mean_in_each_text(
    model: Any, texts: list[Tensor], learned: Learned
) -> None:
    assert learned.maps is None and learned.bases is not None
    for kind in ("keys", "values"):
        near = []
        for ids in texts:
            cache = CompressedCache(model, "full")
            prefill(model, ids, cache)
            table = cache.slot_layers[1].table
            x = (table.key_slots() if kind == "keys" else table.value_slots())[0, :, 4:].double()
            near.append(x - x.mean(1, keepdim=True))
        x = torch.cat(near, 1)
        expected = torch.linalg.eigvalsh(x.mT @ x / x.shape[1]).flip(-1).sqrt()
        basis = getattr(learned.bases, kind)[1]
        torch.testing.assert_close(basis.deviation.double(), expected, rtol=0.02, atol=0.02)
        every = [each.shares for each in getattr(learned.bases, kind).values()]
        assert all(torch.equal(each, every[0]) for each in every), "one layout of codes for all layers"


def test_an_interrupted_fit_goes_on_where_it_stopped(
    model: Any, texts: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And learns the same as one that was not, maps and directions."""
    beside, calls = tmp_path / "file.part", []
    whole = learning.learn(model, texts[:2])

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) in (2, 3):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            learning.learn(model, texts[:2], beside=beside, progress=progress)
    result = learning.learn(model, texts[:2], beside=beside, progress=progress)
    assert [done for done, _ in calls] == [240, 480, 960, 1440, 1920, 2400] and {total for _, total in calls} == {2400}
    assert result.maps is not None and whole.maps is not None and result.bases is not None and whole.bases is not None
    for layer in range(model.config.num_hidden_layers):
        assert torch.equal(result.maps.queries[layer], whole.maps.queries[layer])
        assert torch.equal(result.maps.scores[layer], whole.maps.scores[layer])
        assert result.bases.keys[layer].same(whole.bases.keys[layer])
    # Sums of other texts, or damaged ones, are not gone on from.
    calls.clear()
    learning.learn(model, texts[1:2], maps=False, beside=beside, progress=lambda *now: calls.append(now))
    assert calls == [(240, 240)]
    beside.write_bytes(beside.read_bytes()[:-5])
    learning.learn(model, texts[:2], maps=False, beside=beside)


def test_a_file_serves_what_it_holds(
    model: Any, learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path))
    text, maps = "rehearse:replay=learned:bits=2:basis=learned", fitting.ReplayMap({0: torch.zeros(4, 34, 16)}, {})
    identity = CompressedCache(model).identity.describe()
    path = fitting.default_path(identity)
    with pytest.warns(UserWarning, match=r"uses basis=random; `kvsketch fit MODEL` makes them"):
        cache = CompressedCache(model, text)
    prefill(model, zoo.tokens(1, 80), cache)
    assert cache.method.bases is None and cache.describe().splitlines()[-2:] == [
        "basis=learned: nothing was learned: random directions",
        "replay=learned: virtual, for this model has no maps; `kvsketch fit MODEL` makes them",
    ]
    fitting.save(path, Learned(maps, None), identity)
    with pytest.warns(UserWarning, match=r"uses basis=random; `kvsketch fit MODEL --again`"):
        method = CompressedCache(model, text).method
    assert method.bases is None and method.learned is not None  # type: ignore[attr-defined]
    fitting.save(path, learned, identity)
    fitting._load.cache_clear()
    with pytest.warns(UserWarning, match=r"uses replay=virtual; `kvsketch fit MODEL --again`"):
        method = CompressedCache(model, text).method
    assert method.bases is not None and method.learned is None  # type: ignore[attr-defined]
    assert learned.bases is not None
    for kind in ("keys", "values"):
        for layer, basis in getattr(learned.bases, kind).items():
            assert basis.same(getattr(method.bases, kind)[layer])
    assert CompressedCache(model, "full:bits=2:basis=learned-keys").method.bases.values == {}  # type: ignore[union-attr]
    other = zoo.build("llama", **BIG)
    other.lm_head.weight.data += 1
    shutil.copy(path, fitting.default_path(CompressedCache(other).identity.describe()))
    with pytest.raises(ValueError, match="belongs to another model"):
        CompressedCache(other, text)


def test_a_file_has_a_threshold_of_doubt_or_none(model: Any, learned: Learned, home: Path) -> None:
    """Those from before there were thresholds are read as ever; one that is damaged is told."""
    identity = CompressedCache(model).identity
    path, found = (
        fitting.default_path(identity.describe()),
        DoubtThreshold(0.25, 0.9, ("h2o:budget=1/8",), 90, 40, 20, 19, 30),
    )
    assert "doubt" not in sealed_file.verified(path) and fitting.read(path, identity).doubt is None
    fitting.save(path, learned._replace(doubt=found), identity.describe())
    fitting._load.cache_clear()
    both = fitting.read(path, identity)
    assert both.doubt == found and both.bases is not None
    fitting.save(path, Learned(None, None, found), identity.describe())
    fitting._load.cache_clear()
    assert fitting.read(path, identity) == Learned(None, None, found)
    assert fitting.read(home / "none.safetensors", identity) == Learned(None, None)
    sealed_file.write(path, {}, {**sealed_file.verified(path), "doubt": '{"value": 7, "catch": 0.9, "methods": []}'})
    fitting._load.cache_clear()
    with pytest.raises(ValueError, match=r"threshold of doubt cannot be read \(.*not 7\); run `kvsketch fit` again"):
        fitting.read(path, identity)


def test_a_file_that_is_no_basis_is_refused(model: Any, home: Path) -> None:
    path = fitting.default_path(CompressedCache(model).identity.describe())
    tensors = {name: part for name, part in fitting.load_file(path).items() if not name.endswith(".shares")}
    tensors |= {
        f"{kind}.{layer}.shares": torch.ones(16).to(torch.int8) for kind in ("keys", "values") for layer in (0, 1)
    }
    text = sealed_file.verified(path)
    sealed_file.write(path, tensors, {"model": text["model"]})
    fitting._load.cache_clear()
    with pytest.raises(ValueError, match="are not 16 falling numbers"):
        CompressedCache(model, "full:bits=2:basis=learned")
    assert json.loads(text["model"])["model_type"] == "llama"


# what a user says


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full:bits=2:basis=pca", "basis=pca is not valid; use random, learned, learned-keys"),
        (
            "full:basis=learned",
            r"basis=learned is for keys in 2, 3 or 4 bits, not 16; use such as bits=2, or basis=random",
        ),
        ("full:bits=auto:basis=learned", "basis=learned is for keys in 2, 3 or 4 bits, not auto"),
        ("full:key_bits=4:value_bits=8:basis=learned", "basis=learned is for values in 2, 3 or 4 bits, not 8"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_latents_have_no_directions() -> None:
    with pytest.raises(ValueError, match="basis=learned knows no latents; use basis=random"):
        CompressedCache(zoo.build("deepseek_v3"), "full:bits=4:basis=learned")


def test_a_method_goes_by_its_text(home: Path, model: Any) -> None:
    text = "full:key_bits=3:value_bits=8:basis=learned-keys"
    assert str(parse_method(text)) == text
    cache = CompressedCache(model, text)
    prefill(model, zoo.tokens(1, 80), cache)
    assert overview(cache)["bits"] == "keys 3, values 8, learned directions"
    assert cache.describe().endswith("basis=learned-keys: learned directions")
    for key, value in codecs_of(cache):
        assert isinstance(key, LearnedCodec) and not value.learned and (key.bits, value.bits) == (3, 8)


# what is stored and read


@pytest.mark.parametrize("text", FORMS)
def test_bytes_are_those_of_random_directions_and_the_first_tokens_are_exact(text: str, home: Path, model: Any) -> None:
    ids, mask = zoo.tokens(1, 92), torch.ones(1, 92, dtype=torch.int64)
    sizes = []
    for each in (text, text.rpartition(":basis")[0]):
        cache = CompressedCache(model, method_of(each))
        read_pieces(model, cache, ids, mask, PIECES)
        sizes.append(cache.device_bytes)
    assert sizes[0] == sizes[1] or text.startswith("rehearse")
    exact, cache = CompressedCache(model, "full"), CompressedCache(model, method_of(text))
    for each in (exact, cache):
        prefill(model, ids[:, :80], each)
    held, full = cache.slot_layers[0].table, exact.slot_layers[0].table.key_slots()
    index = held.index_slots()
    for token in range(codes.EXACT):
        at = (index == token).int().argmax(2, keepdim=True)
        if (index == token).any(2).all():
            at = at.unsqueeze(-1).expand(-1, -1, -1, 16)
            torch.testing.assert_close(held.key_slots().gather(2, at)[:, :, 0], full[:, :, token], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", FORMS)
def test_a_padded_row_is_the_row_alone(text: str, home: Path, model: Any) -> None:
    ids, mask = padded(zoo.tokens(2, 92), [0, 7])
    both = read_pieces(model, CompressedCache(model, method_of(text)), ids, mask, PIECES)
    pieces = [(max(0, start - 7), end - 7) for start, end in PIECES]
    alone = read_pieces(model, CompressedCache(model, method_of(text)), ids[1:, 7:], mask[1:, 7:], pieces)
    torch.testing.assert_close(both[:, 1:], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", FORMS)
def test_saved_copied_and_reordered_caches_go_on_as_before(text: str, home: Path, model: Any) -> None:
    ids, mask = padded(zoo.tokens(2, 92), [0, 7])
    cache = CompressedCache(model, method_of(text))
    read_pieces(model, cache, ids, mask, PIECES[:3])
    cache.save(home / "cache.kvs")
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.tensor([1, 0]))
    # The file has its directions with it: it is read where the model's are gone, or are others.
    shutil.rmtree(home / "home")
    fitting._load.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = CompressedCache.load(home / "cache.kvs", model)
    expected = read_pieces(model, cache, ids, mask, PIECES[3:])
    torch.testing.assert_close(read_pieces(model, loaded, ids, mask, PIECES[3:]), expected, atol=0, rtol=0)
    swapped = read_pieces(model, copied, ids.flip(0), mask.flip(0), PIECES[3:])
    torch.testing.assert_close(swapped.flip(1), expected, atol=1e-5, rtol=1e-5)
    assert cache.device_bytes == loaded.device_bytes


def test_a_prompt_at_once_holds_the_codes_of_one_that_comes_in_turns(home: Path, model: Any) -> None:
    """Around the center of the first part, which is that of the second's codes too."""
    ids, mask = zoo.tokens(1, 92), torch.ones(1, 92, dtype=torch.int64)
    whole, steps = (CompressedCache(model, "full:bits=2:basis=learned") for _ in range(2))
    read_pieces(model, whole, ids, mask, [(0, 80), (80, 92)])
    read_pieces(model, steps, ids, mask, [(0, 80), *((at, at + 1) for at in range(80, 92))])
    first = whole.slot_layers[0].table.keys, steps.slot_layers[0].table.keys
    assert all(isinstance(each, SlotCodes) for each in first)
    parts = [each.slot_parts() for each in first]
    for name, part in parts[0].items():
        assert torch.equal(part[:, :, :92], parts[1][name][:, :, :92])


@pytest.mark.parametrize("text", ["full:bits=2:basis=learned", "h2o:bits=3:basis=learned"])
def test_a_draft_that_is_taken_back_leaves_no_trace(text: str, home: Path, model: Any) -> None:
    ids, mask = zoo.tokens(1, 92), torch.ones(1, 92, dtype=torch.int64)
    plain, drafted = (CompressedCache(model, method_of(text)) for _ in range(2))
    for cache in (plain, drafted):
        read_pieces(model, cache, ids, mask, PIECES[:2])
        cache.activate_past_recording()
    read_pieces(model, drafted, zoo.tokens(1, 92, seed=5), mask, [(81, 86)])
    drafted.crop(-5)
    later = [(81, 82), (82, 91), (91, 92)]
    expected = read_pieces(model, plain, ids, mask, later)
    torch.testing.assert_close(read_pieces(model, drafted, ids, mask, later), expected, atol=1e-5, rtol=1e-5)


def test_keys_with_a_large_common_part_keep_their_answers() -> None:
    """In bfloat16, with a bias in the channels that hardly turn, as Qwen2 has it."""
    model = zoo.build("qwen2", **(BIG | {"initializer_range": 0.02})).to(torch.bfloat16)
    for layer in model.model.layers:
        size = layer.self_attn.head_dim
        layer.self_attn.k_proj.bias.data.view(-1, 2, size // 2)[:, :, -size // 8 :] = 40.0
    bases = learning.learn(model, [zoo.tokens(1, 240, seed=seed) for seed in (20, 21)], maps=False).bases
    assert bases is not None
    ids, mask = zoo.tokens(1, 92), torch.ones(1, 92, dtype=torch.int64)
    method = parse_method("full:bits=4:basis=learned").with_bases(bases)
    full, coded = (read_pieces(model, CompressedCache(model, m), ids, mask, PIECES).float() for m in ("full", method))
    assert coded.isfinite().all() and (coded - full).norm() < 0.1 * full.norm()


def test_what_continues_a_document_is_rounded_in_its_directions(home: Path, model: Any) -> None:
    document = CompressedCache(model, "full:bits=3:basis=learned")
    prefill(model, zoo.tokens(1, 150), document)
    behind, copied = document.continued(), copy.deepcopy(document)
    asked = zoo.tokens(1, 30, seed=8)
    outputs = [model(asked, past_key_values=cache, use_cache=True).logits for cache in (behind, copied)]
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-4)
    for token in zoo.tokens(1, 3, seed=9).split(1, 1):
        outputs = [model(token, past_key_values=cache, use_cache=True).logits for cache in (behind, copied)]
        torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-4)
    assert all(key.learned and value.learned for key, value in codecs_of(behind))


@pytest.mark.parametrize(
    "text", ["h2o:budget=16:bits=3:basis=learned", "rehearse:budget=50%:chunk=64:wait=64:bits=3:basis=learned"]
)
def test_requests_share_tables_and_each_gets_what_it_would_get_alone(text: str, home: Path, model: Any) -> None:
    """Rows whose heads differ are also taken out as one table of all layers, each in directions of its own."""
    engine = BatchedEngine(model, text, rows=2, longest=400, prefill="exact")
    assert engine.batched
    lengths = [(100, 70), (80, 10), (150, 20)]
    tickets = [engine.submit(Request(tuple(zoo.tokens(1, n, seed=n)[0].tolist()), count)) for n, count in lengths]
    for ticket, (length, count) in zip(tickets, lengths, strict=True):
        ids, cache = zoo.tokens(1, length, seed=length), CompressedCache(model, text)
        alone = kvsketch.generate(model, ids, cache, max_new_tokens=count, do_sample=False)[0, length:]
        assert list(ticket) == alone.tolist()
    engine.close()


def test_rows_in_other_directions_do_not_join(home: Path, model: Any, texts: list[Tensor]) -> None:
    from kvsketch.slots.store import Equal

    others = learning.learn(model, texts[:1], maps=False).bases
    assert others is not None
    method = parse_method("h2o:budget=16:bits=3:basis=learned")
    tables = []
    for bases in (others, others, CompressedCache(model, method).method.bases):
        assert isinstance(bases, Bases)
        cache = CompressedCache(model, method.with_bases(bases))
        prefill(model, zoo.tokens(1, 80), cache)
        tables.append([layer.table for layer in cache.slot_layers])
    store = Equal(tables[0], 2, [40, 40])  # type: ignore[arg-type]
    assert store.misfit(tables[1]) == ""
    assert "rounded in other directions than the shared table" in store.misfit(tables[2])
