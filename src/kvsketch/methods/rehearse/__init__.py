"""Rehearse: keeps what a text needs to be read again, whatever is asked about it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self, cast

from torch import Tensor

from kvsketch.methods.base import Method
from kvsketch.methods.budget import Size
from kvsketch.methods.capabilities import SUPPORTED, Capabilities, Support, no
from kvsketch.methods.parameters import carried, option
from kvsketch.methods.rehearse.compacting import TokenRange, chosen, settle_behind, undecided
from kvsketch.methods.rehearse.rebuild import Rebuild
from kvsketch.methods.rehearse.refit import queries_of
from kvsketch.methods.replay import Piece, Replay, ReplayedMethod, equal_chunks, pieces_of
from kvsketch.methods.replay_map import ReplayMap
from kvsketch.methods.waiting import LEAST_WAITING
from kvsketch.slots import coding
from kvsketch.slots.bytes import LayerShape
from kvsketch.slots.codes import FEW, MIN_TOKENS_TO_QUANTISE
from kvsketch.slots.table import SlotTable

REPLAYS = VIRTUAL, EXACT, LEARNED, AUTO = ("virtual", "exact", "learned", "auto")
REFITS = FULL, FOLD, NONE = ("full", "fold", "none")
QUERIES = 1024  # of a chunk and KV head that a refit takes; on a CPU the first of them (`refit.queries_of`)
# Bits of keys and values by the share of the bytes, from which on. Fewer bits leave room for more tokens, and answer
# more the smaller the share (docs/quantisation.md); bits by layer or head, by what rounding costs, answer less.
BITS_BY_BYTES = ((Fraction(3, 32), 4, 4), (Fraction(3, 64), 4, 2), (Fraction(0), 3, 2))
COMPACT, UNLIMITED = "compact", 1 << 40  # `wait` of tokens about which `CompressedCache.compact` decides


def with_replay(text: str, method: Method, replay: str) -> Method:
    """The method of a text; rehearse with this replay, unless the text names one."""
    named = "replay" in (part.partition("=")[0].strip() for part in text.split(":"))
    return replace(method, replay=replay) if isinstance(method, Rehearse) and not named else method


@dataclass(frozen=True)
class Rehearse(ReplayedMethod):
    """Keeps the tokens that the text itself would attend to if it were read again, and refits their weights and values.

    Chunk by chunk, after all layers have read the tokens:

        score    of token j: the most attention any query gives it when the text is read again (`ops.replay_scores`)
        choose   sinks and the last `recent` tokens stay; the others compete, with `share=model` in all layers and heads
                 together, so that the mean over heads is the budget
        refit    new weights and values for what stays, so that replayed queries see the mass and output of the whole
                 chunk (`refit.py`); a head that gains nothing on held-out queries stays unchanged. With `refit=fold` a
                 dropped token is merged with the kept one with the nearest key

    With `replay=virtual` queries are rotated to the positions of a second reading, which needs rotary embeddings and no
    forward. With `replay=exact` the model reads the text in a second forward (`CompressedCache.replay`,
    which `kvsketch.prefill` and `generate` call), which takes longer than the first. With `replay=learned` maps
    that were fitted once for the model predict its queries and scores in a second reading (`replay_map.py`,
    `kvsketch fit`). `replay=auto` is learned for a model that has maps, and virtual for others.

    New tokens after a prompt are stored uncompressed until there is a chunk of them, or `wait`, and are then
    compressed. With `wait=compact` `CompressedCache.compact` says which tokens are compressed, and to what size. The
    question need not be known when the cache is compressed.

    Scores and one budget for all heads as in KVzip (Kim et al., arXiv 2505.23416), which repeats the text in a second
    forward; refitting after Attention Matching (Zweiger et al., arXiv 2602.16284).
    """

    name: ClassVar[str] = "rehearse"
    family: ClassVar[str] = "summarise"
    paper: ClassVar[str] = "arXiv 2505.23416"
    look: ClassVar[tuple[str, ...]] = ("#b3123d", "*")

    recent: Size | int | str = 32
    replay: str = option(
        VIRTUAL,
        "exact: the model reads the text again; learned: maps from kvsketch fit; auto: learned if there are maps of "
        "the model, else virtual",
        REPLAYS,
    )
    refit: str = option(FULL, "how weights and values of what stays are refitted", REFITS)
    chunk: int = option(2048, "tokens that are compressed together")
    wait: int | str = option(
        512, "new tokens after a prompt that are compressed together; compact: none until cache.compact"
    )
    map: str = option("", "file of replay=learned, written by `kvsketch fit`; empty: the file of the model, if any")
    loss: Size | str | None = option(None, "largest loss of likelihood, such as 2%, instead of a budget")
    bits: int | str = 4
    learned: ReplayMap | None = carried()  # what `map` holds, once the model is known

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_whole("chunk", least=64, unit="tokens")
        self._require_whole(*(() if self.told else ("wait",)), least=LEAST_WAITING, unit="tokens")
        if self.map and self.replay != LEARNED:
            raise ValueError(f"{self.name}: map={self.map} is for replay=learned; replay is {self.replay}")
        if self.loss in (None, "None"):
            self._set("loss", None)
        else:
            loss = Size.parse(cast(str, self.loss), f"{self.name}: loss")
            self._set("loss", loss)
            self._require("loss", loss.share is not None, "a share such as 2%")
            self._require("budget", self.budget_size == Size.parse("50%"), "no budget together with loss")
            self._require("bytes", self.bytes is None, "no bytes together with loss")
        self._require("wait", not (self.told and self.promises), "a number of tokens together with loss")

    def for_bytes(self, share: Fraction) -> Self:
        if (self.bits, self.key_bits, self.value_bits) != (FEW, None, None):
            return self
        keys, values = next(bits for least, *bits in BITS_BY_BYTES if share >= least)
        return replace(self, key_bits=None if keys == FEW else keys, value_bits=None if values == FEW else values)

    @property
    def declared(self) -> Capabilities:
        sized = SUPPORTED
        if self.told:
            sized = no("its tokens wait until they are compacted; use a number, as wait=512")
        elif self.promises:
            sized = no("with loss every text has a budget of its own; use budget")
        repeats = no(f"with {'loss' if self.promises else f'replay={self.replay}'} the model repeats the text")
        return replace(
            super().declared,
            batched=sized,
            memory=sized,
            documents=repeats if self.repeats else SUPPORTED,
            latent=SUPPORTED if self.refit == NONE else no(f"refit={self.refit} rewrites values; use refit=none"),
            stream=no("with loss several budgets are tried on the whole text") if self.promises else SUPPORTED,
            vllm=sized and self.in_equal_pages,
        )

    @property
    def in_equal_pages(self) -> Support:
        if self.replay == EXACT:
            return no(f"nobody repeats a prompt as replay={EXACT} does; use replay={VIRTUAL}")
        if self.replay == LEARNED and not self.map:
            return no(
                f"replay={LEARNED} finds its maps by the weights, which the plugin does not read; add map=FILE, which "
                f"`kvsketch fit MODEL --text FILES --out FILE` writes, or use replay={VIRTUAL}"
            )
        if not self.told and int(self.wait) < MIN_TOKENS_TO_QUANTISE:
            return no(
                f"a prompt too short to be quantised waits as a whole, and wait={self.wait} leaves no room for it; use "
                f"wait={MIN_TOKENS_TO_QUANTISE} or more"
            )
        # A share of the prompt too: it is kept whole until all of it is there.
        return SUPPORTED

    # score: what the text would look at if it came again

    @property
    def repeats(self) -> bool:
        return self.replay == EXACT or self.promises

    @property
    def promises(self) -> bool:
        return self.loss is not None

    def replayer(self, table: SlotTable) -> Replay:
        # A CPU refits with the first of the queries alone; the others are not copied.
        queries = 0 if self.refit == NONE else queries_of(0, QUERIES, table.device)
        return Replay(self.chunk, self.sinks, queries, self.learned)

    def with_map(self, learned: ReplayMap) -> Self:
        """The method with the maps of a model (`cache.replay.fitting`)."""
        return replace(self, learned=learned)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if not (self.repeats and self.queue(table).wait_for_repetition()):
            super().compress(table, queries)
        elif self.replay != EXACT:
            self.score(table, queries)

    def pieces(self, tokens: int, most: int) -> list[Piece]:
        return pieces_of(tokens, min(self.chunk, most)) if self.replay == EXACT else []

    def learn(self, table: SlotTable, queries: Tensor, copies: Tensor, piece: Piece) -> None:
        self.replayer(table).exact(table, queries, copies, piece.tokens)

    def score(self, table: SlotTable, queries: Tensor) -> None:
        self.replayer(table).virtual(table, queries)

    def score_part(self, table: SlotTable, queries: Tensor, lengths: Sequence[int], behind: int, end: int) -> None:
        """Scores chunks of a text that will have `end` tokens, in front of the last `behind` that are there."""
        self.replayer(table).virtual(table, queries, lengths, behind, end)

    def wants_sums_of(self, table: SlotTable) -> bool:
        # A third of a virtual replay on a CPU is done when a text has been read.
        return table.device.type == "cpu" and self.replay in (VIRTUAL, AUTO) and table.seen == table.new_tokens

    # keep: the best of all heads, refitted

    def settle(self, tables: Sequence[SlotTable]) -> None:
        if self.queue(tables[0]).unreplayed:
            return
        if keep := self.chosen(tables, self.chunk):
            self.keep_refitted(tables, keep)

    @property
    def rebuild(self) -> Rebuild:
        return Rebuild(self, folds=self.refit == FOLD)

    def keep_refitted(self, tables: Sequence[SlotTable], keep: Sequence[Tensor], behind: int = 0) -> None:
        """Keeps slots [B, H, S]; the tokens that have scores, all but the last `behind`, are refitted."""
        if self.refit == NONE:
            self.keep_chosen(tables, keep)
        else:
            self.rebuild.keep(tables, keep, behind)

    def compact(self, tables: Sequence[SlotTable], ranges: Sequence[TokenRange]) -> None:
        """Rehearses stretches of the tokens that wait, each to a size of its own (`compacting`)."""
        # A text that is too short for codes waits for more of it.
        if coding.waits(tables[0]) or not (rest := undecided(tables, ranges)):
            return
        count, behind = rest[-1].end - rest[0].begin, tables[0].seen - rest[-1].end
        lengths = [length for each in rest for length in equal_chunks(each.end - each.begin, self.chunk)]
        for table in tables:
            self.replayer(table).virtual(table, self.queue(table).kept_queries(count), lengths, behind)
        self.keep_ranges(tables, rest)

    def keep_ranges(self, tables: Sequence[SlotTable], ranges: Sequence[TokenRange]) -> None:
        """Keeps the best of stretches that have scores: the first that wait, without gaps."""
        count, behind = ranges[-1].end - ranges[0].begin, tables[0].seen - ranges[-1].end
        waiting = [self.queue(table).kept_bytes(count, behind) for table in tables]
        self.keep_refitted(tables, chosen(tables, ranges, self.sinks, self.share), behind)
        for table, queries in zip(tables, waiting, strict=True):
            settle_behind(table, queries, self.room_behind(table.seen))

    # what it asks of models and callers

    @property
    def most_waiting(self) -> int:
        return UNLIMITED if self.told else min(self.chunk, int(self.wait))

    @property
    def told(self) -> bool:
        return self.wait == COMPACT

    def kept_heads(self, heads: int, query_heads: int) -> int:
        # A repetition has queries of its own.
        return 0 if self.told and self.repeats else super().kept_heads(heads, query_heads)

    def stored_bytes(self, shape: LayerShape) -> int | None:
        return None if self.promises or self.told else super().stored_bytes(shape)

    @property
    def needs_angles(self) -> tuple[str, str] | None:
        return ("rotates queries", "replay=exact") if self.replay != EXACT else None
