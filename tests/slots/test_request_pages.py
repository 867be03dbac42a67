"""Pages that hold all layers of a request, against a plain model: lists of the tokens that each head holds.

Requests are put into pages, take single tokens in batches of any pages, are decided upon and put back, and give their
page to others, in any order. What a request reads is what it brought and what was appended since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from kvsketch.ops import codec as codecs
from kvsketch.slots import codes, packing
from kvsketch.slots.codes import QuantBits
from kvsketch.slots.context import LayerContext
from kvsketch.slots.layout import Layout
from kvsketch.slots.pages import RequestPages, RequestShape, like_table
from kvsketch.slots.state import TableState, per_row, per_slot
from kvsketch.slots.table import SlotTable
from tests.helpers.common import also

LAYERS, HEADS, QUERY_HEADS, SIZE = 2, 2, 4, 16
PAGES, SLOTS, ROOM = 4, 12, 5  # slots of a head on average, and new tokens of a head that wait
LONGEST = 1000  # tokens of a request
NEG_INF = float("-inf")
BITS = {"16 bits": QuantBits(), "4 bits": QuantBits(4, 4), "values in 4 bits": QuantBits(16, 4)}


@dataclass
class Waiting(TableState):
    score: Tensor | None = per_slot()  # [B, H, S]
    queries: Tensor | None = per_row()  # of tokens that wait, [B, heads, room, ...]


@dataclass
class Token:
    number: int
    held: Tensor  # key, value, logarithm of the weight, score, one after the other


@dataclass
class Held:
    """A request as lists of tokens, by layer and head."""

    heads: dict[tuple[int, int], list[Token]]
    centers: list[dict[str, Tensor]]  # of each layer
    seen: int
    settled: int
    queries: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])  # as the page keeps them

    @property
    def waiting(self) -> int:
        return self.seen - self.settled


def read(table: SlotTable) -> tuple[Tensor, Tensor]:
    """The tokens of the slots [B, H, S], and key, value, logarithm of the weight and score of each, [B, H, S, n]."""
    index, score, log_den = table.stored_index(), table.state_of(Waiting).score, table.log_weights()[1]
    assert index is not None and score is not None and log_den is not None
    score = score if table.layout is None else table.layout.unpacked(score)
    return index, torch.cat([table.key_slots(), table.value_slots(), log_den.unsqueeze(-1), score.unsqueeze(-1)], 3)


class Machine(RuleBasedStateMachine):
    """`bits` and `equal` say what the requests are like."""

    bits = QuantBits()
    equal = False

    @initialize(seed=st.integers(0, 2**20))
    def begin(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.places = [LayerContext(layer, LAYERS, bits=self.bits) for layer in range(LAYERS)]
        like = [like_table(place, Waiting, HEADS, SIZE, SIZE, torch.float32) for place in self.places]
        shape = RequestShape(like[0], LAYERS, QUERY_HEADS, SLOTS, ROOM, LONGEST)
        # Memory that others have used: as floating point numbers it is nan.
        pool = torch.full((1 + PAGES, shape.nbytes), 255, dtype=torch.uint8)
        self.pages = RequestPages(shape, pool, like)
        self.requests: dict[int, Held] = {}
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.pages.planes.values(), *self.pages.store.slots.values())]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _coded(self, name: str) -> bool:
        return bool(getattr(self.bits, name) != codes.UNQUANTISED)

    # whole requests

    @rule(page=st.integers(1, PAGES), tokens=st.integers(2, 40), cut=st.booleans())
    def put(self, page: int, tokens: int, cut: bool) -> None:
        """A request that begins; the page may be another's, who has gone. A short one may be put as it was read."""
        tables = [SlotTable(place) for place in self.places]
        request = Held({}, [], tokens, tokens)
        for layer, table in enumerate(tables):
            pair = {name: self._random(1, HEADS, tokens, SIZE) for name in ("keys", "values")}
            # The first tokens are unlike the others, and stay exact.
            pair["keys"][:, :, : codes.EXACT] *= 20
            table.append(pair["keys"], pair["values"])
            score = table.state_of(Waiting).score = torch.rand(1, HEADS, tokens, generator=self.random)
            held = [codes.PlainSlots(x).coded(getattr(self.bits, name), None).plain() for name, x in pair.items()]
            whole = torch.cat([*held, torch.zeros(1, HEADS, tokens, 1), score.unsqueeze(-1)], 3)[0]
            request.centers.append({name: codes.center_of(x) for name, x in pair.items() if self._coded(name)})
            for head in range(HEADS):
                request.heads[layer, head] = [Token(n, whole[head, n]) for n in range(tokens)]
        if cut or tokens > SLOTS:
            self._decide(tables, request)
        else:
            for table in tables:
                table.count(settled=table.seen)
        self.pages.put(page, tables)
        self.requests[page] = request

    def _decide(self, tables: list[SlotTable], request: Held) -> None:
        """Tokens go until the page has room for the others, which get weights: in the tables and in the model."""
        for layer, table in enumerate(tables):
            packing.unpack(table)
            index = table.index_slots()
            stays, weights = torch.zeros(table.shape, dtype=torch.bool), torch.zeros(table.shape)
            # What one head has more than the average, the other has less.
            more = 0 if self.equal else int(torch.randint(1 - SLOTS, SLOTS, (), generator=self.random))
            for head, count in enumerate((SLOTS + more, SLOTS - more)):
                held = request.heads[layer, head]
                chosen = torch.randperm(len(held), generator=self.random).tolist()[:count]
                kept = [held[at] for at in sorted(chosen)]
                for token in kept:
                    token.held[-2] = self._random(1)[0]
                    at = (index[0, head] == token.number).nonzero().item()
                    stays[0, head, at], weights[0, head, at] = True, token.held[-2]
                request.heads[layer, head] = kept
            table.keep(stays, Layout.of(stays.sum(-1) + 1, bool(self.bits)), weights)
            table.count(settled=table.seen)
        request.settled, request.queries = request.seen, [[] for _ in range(LAYERS)]

    def _tables(self, page: int) -> list[SlotTable]:
        return self.pages.take(page, self.requests[page].seen, self.requests[page].settled)

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 11), decides=st.booleans(), more=st.integers(0, 6))
    def decide(self, number: int, decides: bool, more: int) -> None:
        """A request is opened and put back into its page: as it is, or after a decision, perhaps with more tokens."""
        page = self._page(number)
        request, tables = self.requests[page], self._tables(page)
        if decides and more > 1:
            for layer, table in enumerate(tables):
                keys, values = self._random(1, HEADS, more, SIZE), self._random(1, HEADS, more, SIZE)
                table.append(keys, values)
                self._append(request, layer, keys, values)
            request.seen += more
        if decides:
            self._decide(tables, request)
        self.pages.put(page, tables)

    def _page(self, number: int) -> int:
        return sorted(self.requests)[number % len(self.requests)]

    # single tokens

    @precondition(lambda self: any(request.waiting < ROOM for request in self.requests.values()))
    @rule(
        order=st.permutations(range(1, PAGES + 1)),
        count=st.integers(1, PAGES),
        tokens=st.sampled_from([1, 1, 2]),
        nobody=st.sampled_from([[], [], [-1], [7, -1]]),
    )
    def write(self, order: list[int], count: int, tokens: int, nobody: list[int]) -> None:
        """Tokens for some of the requests, in any order of their pages; `nobody`: tokens of rows in page 0."""
        for _ in range(tokens):
            able = [page for page in order if page in self.requests and self.requests[page].waiting < ROOM]
            if able:
                self._write(able[:count], nobody)

    def _write(self, pages: list[int], nobody: list[int]) -> None:
        seen = torch.tensor([*(self.requests[page].seen for page in pages), *nobody])
        step = self.pages.rows(torch.tensor(pages + [0] * len(nobody)), seen)
        for layer in range(LAYERS):
            q, k, v = (self._random(len(seen), heads, SIZE) for heads in (QUERY_HEADS, HEADS, HEADS))
            table = self.pages.write(step, layer, q, k, v)
            for row, page in enumerate(pages):
                request = self.requests[page]
                self._append(request, layer, k[row][None, :, None], v[row][None, :, None])
                queries = self.pages.planes["queries"][page, layer, :, request.waiting].clone()
                assert not any(torch.equal(queries, other) for other in request.queries[layer]), "queries of another"
                request.queries[layer].append(queries)
            result = read(table)
            for row, page in enumerate(pages):
                request = self.requests[page]
                # The numbers of tokens that wait are written when the request is opened.
                self._check(request, layer, result, row, unnumbered=request.waiting + 1)
        for page in pages:
            self.requests[page].seen += 1

    def _append(self, request: Held, layer: int, keys: Tensor, values: Tensor) -> None:
        pair = []
        for name, x in (("keys", keys), ("values", values)):
            if self._coded(name):
                center, codec = request.centers[layer][name], codecs.Codec(getattr(self.bits, name), SIZE)
                none, at = x.new_zeros(1, HEADS, 0, SIZE), torch.zeros(1, HEADS, 0, dtype=torch.int32)
                x = codecs.CodedSlots(codec, center, none, at, *codecs.encode(x, center, codec)).decoded(x.dtype)
            pair.append(x)
        whole = torch.cat([*pair, torch.zeros(*x.shape[:3], 2)], 3)[0]
        for head in range(HEADS):
            new = [Token(request.seen + n, whole[head, n]) for n in range(whole.shape[1])]
            request.heads[layer, head].extend(new)

    # what holds at any time

    @invariant()
    def each_request_reads_what_it_holds(self) -> None:
        for page, request in self.requests.items():
            assert int(self.pages.planes["settled"][page]) == request.settled
            for layer, table in enumerate(self._tables(page)):
                self._check(request, layer, read(table), 0)
                counts = (table.seen, table.settled, int(table.seen_on_device()))
                assert counts == (request.seen, request.settled, request.seen)
                assert table.next_slot is not None
                held = [len(request.heads[layer, head]) for head in range(HEADS)]
                assert table.next_slot.flatten().tolist() == held
                queries = table.state_of(Waiting).queries
                assert queries is not None
                for place, wanted in enumerate(request.queries[layer]):
                    assert torch.equal(queries[0, :, place], wanted)

    def _check(self, request: Held, layer: int, result: tuple[Tensor, Tensor], at: int, unnumbered: int = 0) -> None:
        """Row `at` of what was read holds the tokens of the model, one after the other, and nothing behind them."""
        for head in range(HEADS):
            held, (index, whole) = request.heads[layer, head], (part[at, head] for part in result)
            count = len(held)
            numbered = count - unnumbered
            assert index[:numbered].tolist() == [token.number for token in held[:numbered]]
            wanted = torch.stack([token.held for token in held])
            assert torch.allclose(whole[:count], wanted, atol=1e-4, rtol=1e-4), (whole[:count], wanted)
            assert (index[count:] < 0).all() and (whole[count:, -2] == NEG_INF).all()
            assert whole[count:, : 2 * SIZE].isfinite().all(), "what weighs nothing must not be nan"

    @invariant()
    def no_two_heads_share_a_slot(self) -> None:
        rows = self.pages.shape.rows
        for page, request in self.requests.items():
            end = 0
            for layer in range(LAYERS):
                for head in range(HEADS):
                    kept = len(request.heads[layer, head]) - request.waiting
                    assert int(self.pages.planes["kept"][page, layer, head]) == kept
                    assert int(self.pages.planes["start"][page, layer, head]) == page * rows + end
                    end += kept + ROOM
            assert end < rows, "one slot takes what belongs nowhere"

    @invariant()
    def no_address_changes(self) -> None:
        assert self._addresses() == self.addresses


@pytest.mark.parametrize("equal", [False, True], ids=["differing heads", "equal heads"])
@pytest.mark.parametrize("bits", [*list(BITS)[:2], *also(*list(BITS)[2:])])
def test_requests_in_pages_hold_what_lists_hold(bits: str, equal: bool) -> None:
    kind = type("Machine", (Machine,), {"bits": BITS[bits], "equal": equal})
    bounded = settings(max_examples=4, stateful_step_count=20, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(kind, settings=bounded)
