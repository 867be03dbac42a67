"""Documents that requests in pages continue, without vLLM: queries see the document and their own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from kvsketch.integrations.vllm.behind import Prompt
from kvsketch.integrations.vllm.document_index import Stored, Use
from kvsketch.integrations.vllm.document_pool import DocumentPool
from kvsketch.integrations.vllm.files import Filed, listed, path_of
from kvsketch.integrations.vllm.joint_layers import JointLayers
from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import Rehearse, parse_method
from kvsketch.ops import rotate_queries
from kvsketch.ops.rotate_keys import whole_turns
from kvsketch.slots import SlotTable
from tests.integrations.test_vllm_joint_layers import GROUP, HEADS, LAYERS, SCALE, SIZE, kept, places

DOCUMENT = 100  # tokens
Tokens = list[tuple[Tensor, Tensor, Tensor]]  # q [n, Hq, D], k and v [n, H, D] of each layer


class Served:
    """Four pages, and two places for documents."""

    def __init__(self, bits: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        method = servable(parse_method(f"rehearse:budget=40:wait=64:recent=8:bits={bits}"))
        assert isinstance(method, Rehearse)
        self.joint = JointLayers(method, shares=True)
        for place in places(method):
            self.joint.join(place, SCALE)
        shape = self.joint.shape(LAYERS, HEADS, HEADS * GROUP, SIZE, SIZE, torch.float32, longest=400)
        self.joint.open_documents(replace(method, budget=60), 2, None)
        self.pool = torch.zeros((4, shape.nbytes), dtype=torch.uint8)
        self.pool[1:] = 255  # what others have left there

    @property
    def document_pool(self) -> DocumentPool:
        assert self.joint.document_pool is not None
        return self.joint.document_pool

    def tokens(self, n: int) -> Tokens:
        return [
            tuple(torch.randn(n, heads, SIZE, generator=self.generator) for heads in (HEADS * GROUP, HEADS, HEADS))
            for _ in range(LAYERS)
        ]  # type: ignore[misc]

    def begin(self, uses: dict[int, Use], stores: dict[int, Stored] | None = None) -> None:
        self.joint.begin_requests(self.pool, uses, stores or {})

    def read(self, page: int, seen: int, new: Tokens) -> list[Tensor]:
        self.joint.begin(self.pool)
        result = [self.joint.prefill(layer, page, seen, *part) for layer, part in enumerate(new)]
        self.joint.finish()
        return result

    def step(self, seen: dict[int, int], new: dict[int, Tokens]) -> dict[int, list[Tensor]]:
        """A token of each request, by page; the first row of the step is none."""
        self.joint.catch_up(self.pool, seen.items())
        self.joint.begin(self.pool)
        pages, counts = torch.tensor([0, *seen]), torch.tensor([-1, *seen.values()])
        result: dict[int, list[Tensor]] = {page: [] for page in seen}
        for layer in range(LAYERS):
            parts = [torch.cat([new[page][layer][part] for page in (next(iter(seen)), *seen)]) for part in range(3)]
            out = self.joint.decode(layer, pages, counts, *parts)
            for row, page in enumerate(seen):
                result[page].append(out[row + 1 : row + 2])
        self.joint.finish()
        return result

    def stored(self) -> None:
        self.begin({1: Use()}, {1: Stored(1)})
        self.read(1, 0, self.tokens(DOCUMENT))

    def on_the_shelf(self, place: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values [H, S, D] and log-weights [H, S] of a document, by layer."""
        beside = self.document_pool.beside(torch.tensor([[place, 0, 0]]), torch.float32)
        result = []
        for table in beside.tables:
            weights = table.log_weights()[1]
            assert weights is not None
            result.append((table.key_slots()[0], table.value_slots()[0], weights[0]))
        return result


def attended(q: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:  # [1, Hq, D]
    """Attention of q [1, Hq, D] to slots of several kinds, in one softmax."""
    keys, values, weights = (torch.cat(part, 1).double() for part in zip(*parts, strict=True))
    logits = torch.einsum("hgd,hsd->hgs", q[0].double().view(HEADS, GROUP, SIZE), keys) * SCALE + weights.unsqueeze(1)
    return torch.einsum("hgs,hsd->hgd", logits.softmax(-1), values).reshape(1, -1, SIZE).float()


def own(tokens: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [H, n, D] of one layer's tokens, which weigh 1."""
    keys, values = (torch.cat([part[at] for part in tokens]).transpose(0, 1) for at in (1, 2))
    return keys, values, torch.zeros(keys.shape[:2])


@pytest.mark.parametrize("ahead", [0, DOCUMENT], ids=["begins with it", "names it"])
def test_a_request_sees_the_document_and_its_own_tokens(ahead: int) -> None:
    served = Served(bits=16)
    served.stored()
    use = Use(1, 0 if ahead else DOCUMENT, ahead)
    served.begin({2: use, 3: use})
    books = served.on_the_shelf(1)
    assert sum(keys.shape[1] for keys, _, _ in books) > 0
    said: list[Tokens] = [served.tokens(5)]
    turns = whole_turns(tuple(served.joint.places[0].rotary), torch.device("cpu"))

    def placed(part: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys where they belong, behind the document."""
        q, k = (
            rotate_queries(x.transpose(0, 1).unsqueeze(0), torch.tensor([[ahead]]), turns)[0].transpose(0, 1)
            for x in part[:2]
        )
        return q, k, part[2]

    result = served.read(2, use.before, said[0])
    for layer in range(LAYERS):
        q, k, v = placed(said[0][layer])
        for last in range(5):
            wanted = attended(q[last : last + 1], [books[layer], own([(q, k[: last + 1], v[: last + 1])])])
            torch.testing.assert_close(result[layer][last : last + 1], wanted, atol=2e-5, rtol=1e-4)
    # The first token of the other request comes alone.
    first = served.tokens(1)
    for count in range(4):
        new = served.tokens(1)
        said.append(new)
        other = first if count == 0 else served.tokens(1)
        out = served.step({2: use.before + 5 + count, 3: use.before + count}, {2: new, 3: other})
        for layer in range(LAYERS):
            mine = [placed(part[layer]) for part in said]
            wanted = attended(mine[-1][0], [books[layer], own(mine)])
            torch.testing.assert_close(out[2][layer], wanted, atol=2e-5, rtol=1e-4)
            if count == 0:
                alone = placed(first[layer])
                wanted = attended(alone[0], [books[layer], own([alone])])
                torch.testing.assert_close(out[3][layer], wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_document_never_changes_and_others_do_not_see_it(bits: int) -> None:
    served, plain = Served(bits), Served(bits)
    served.stored()
    before = [part.clone() for layer in served.on_the_shelf(1) for part in layer]
    served.begin({2: Use(1, DOCUMENT), 3: Use()})
    plain.begin({3: Use()})
    prompt = plain.tokens(70)
    torch.testing.assert_close(served.read(3, 0, prompt), plain.read(3, 0, prompt))
    for count in range(70):
        # Both are rehearsed meanwhile.
        new, other = served.tokens(1), served.tokens(1)
        result = served.step({2: DOCUMENT + count, 3: 70 + count}, {2: other, 3: new})
        wanted = plain.step({3: 70 + count}, {3: new})
        torch.testing.assert_close(result[3], wanted[3], atol=2e-5, rtol=1e-4)
        assert all(part.isfinite().all() for part in result[2])
    assert served.joint.settled[2] == 64
    after = [part for layer in served.on_the_shelf(1) for part in layer]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_a_request_says_is_coded_around_the_center_of_the_document() -> None:
    """A short question, and a first token that comes alone, have no mean of their own to speak of."""
    served = Served(bits=4)
    served.begin({1: Use()}, {1: Stored(1)})
    served.read(1, 0, [(q, k + 7, v - 3) for q, k, v in served.tokens(DOCUMENT)])
    served.begin({2: Use(1, 0, DOCUMENT), 3: Use()})
    served.read(2, 0, served.tokens(5))
    planes, document_pool = served.joint.pages(served.pool).planes, served.document_pool.pages.planes
    for name in ("keys.center", "values.center"):
        assert document_pool[name][1].abs().mean() > 2
        for page in (1, 2):
            assert torch.equal(planes[name][page], document_pool[name][1])
        assert not planes[name][3].any(), "others begin around zero"
    assert served.joint.settled[2] == 0, "a question waits until more is said"


@pytest.mark.parametrize("later", [50, 90], ids=["with others", "by itself"])
@pytest.mark.parametrize("bits", [16, 4])
def test_a_later_part_behind_a_document_keeps_what_a_cache_of_its_own_keeps(bits: int, later: int) -> None:
    """It has no sinks of its own, its first tokens wait, and it is scored behind those of the document."""
    served = Served(bits)
    served.joint.most_held = 400
    served.stored()
    served.begin({2: Use(1, DOCUMENT)})
    parts = served.tokens(30), served.tokens(later)
    served.read(2, DOCUMENT, parts[0])
    assert served.joint.settled[2] == 0
    served.joint.begin(served.pool)
    for layer, (q, k, v) in enumerate(parts[1]):
        prompts = [Prompt(2, 0, later, DOCUMENT + 30)]
        served.joint.read_prompts(layer, prompts, q, k, v, torch.empty_like(q))
    served.joint.finish()
    assert served.joint.settled[2] == 30 + later
    books = served.document_pool.beside(torch.tensor([[1, DOCUMENT, 0]]), torch.float32).tables
    method = served.joint.method
    alone = [
        SlotTable(place, document=replace(page_map, seen=DOCUMENT))
        for place, page_map in zip(places(method), books, strict=True)
    ]
    for part in parts:
        for table, new in zip(alone, part, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in new)
            table.append(k, v)
            table.forward.scale = SCALE
            method.compress(table, q)
        method.settle(alone)
        for table in alone:
            method.bound(table, 0)  # what waits is quantised, as before a first answer
    ours = served.joint.pages(served.pool).take(2, 30 + later, 30 + later)
    assert [kept(table) for table in ours] == [kept(table) for table in alone]


def test_the_request_that_stores_a_document_goes_on_behind_it() -> None:
    served = Served(bits=16)
    served.stored()
    assert served.joint.uses[1] == Use(1, DOCUMENT) and served.joint.settled[1] == 0
    new = served.tokens(1)
    result = served.step({1: DOCUMENT}, {1: new})
    for layer, page_map in enumerate(served.on_the_shelf(1)):
        wanted = attended(new[layer][0], [page_map, own([new[layer]])])
        torch.testing.assert_close(result[1][layer], wanted, atol=2e-5, rtol=1e-4)
    kept = [int(keys.shape[1]) for keys, _, _ in served.on_the_shelf(1)]
    assert max(kept) < DOCUMENT, "documents have a budget"


CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS, head_dim=SIZE,
)  # fmt: skip


def kept_in(folder: Path) -> tuple[Served, Path]:
    """A document of 100 tokens that was stored, and its file."""
    served, path = Served(bits=4), path_of(folder, "the / book")
    served.joint.config = CONFIG
    served.begin({1: Use()}, {1: Stored(1, path, "digest of its tokens")})
    served.read(1, 0, served.tokens(DOCUMENT))
    for writer in served.joint.writers:
        writer.join()
    return served, path


def test_a_document_is_kept_as_a_file(tmp_path: Path) -> None:
    served, path = kept_in(tmp_path)
    again = Served(bits=4)
    again.joint.config = CONFIG
    assert listed(tmp_path, CONFIG, again.document_pool.method) == {
        "the / book": Filed(path, DOCUMENT, "digest of its tokens")
    }
    assert again.joint.begin_requests(again.pool, {2: Use(2, DOCUMENT)}, {}, {2: path}) == set()
    for before, after in zip(served.on_the_shelf(1), again.on_the_shelf(2), strict=True):
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_file_of_another_kind_is_no_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served, path = kept_in(tmp_path)
    method = served.document_pool.method

    def refused(config: Any, method: Rehearse) -> str:
        caplog.clear()
        assert listed(tmp_path, config, method) == {}
        return caplog.text

    other = LlamaConfig(**{**CONFIG.to_dict(), "head_dim": 2 * SIZE})
    assert f"head_dim is {SIZE} in the file and {2 * SIZE} here" in refused(other, method)
    assert "it was read with rehearse:budget=60" in refused(CONFIG, replace(method, wait=128))
    assert "it holds 60 tokens per head, and documents have 20 here" in refused(CONFIG, replace(method, budget=20))
    path.write_bytes(path.read_bytes()[:-8])
    assert "the%20" not in path.name and "is no document here" in refused(CONFIG, method)
    assert served.joint.begin_requests(served.pool, {2: Use(2), 3: Use(1)}, {}, {2: path}) == {2}
    assert "a document cannot be read" in caplog.text


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    assert path_of(tmp_path, "../a").parent == tmp_path
    for name in ("", "x" * 201):
        with pytest.raises(ValueError, match=r"cannot be a file; use 1 to 200"):
            path_of(tmp_path, name)


def test_documents_that_do_not_fit_are_refused() -> None:
    served = Served(bits=4)
    with pytest.raises(ValueError, match=r"9 documents of [\d,]+ MB each do not fit into 1 MB of free memory"):
        served.joint.open_documents(replace(served.joint.method, budget=5000), 9, 1_000_000)
