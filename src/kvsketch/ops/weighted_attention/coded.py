"""The Triton program that reads quantised keys or values (`common/quantised.py`); what it shares with that for 16 bits
is in `plain.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvsketch.ops.common.kernel import (
    LOG2E,
    NEG_INF,
    begin,
    block_of,
    dot,
    gather_tile,
    load_columns,
    load_tile,
    prefetch,
    store_columns,
)
from kvsketch.ops.common.quantised import (
    across,
    add_exact,
    add_values,
    add_words,
    around,
    exact_products,
    load_by_words,
    load_fields,
    load_levels,
    load_vector,
    load_words,
    of_rows,
    once,
    operand,
    query_operands,
    store_by_words,
    value_operand,
    word_products,
)
from kvsketch.ops.common.ragged import EXACT_SLOTS
from kvsketch.ops.common.sums import add_terms, load_weights, no_terms, store_sums
from kvsketch.ops.weighted_attention.plain import add_bias, bias_of_rows, finish_scores

WORTH_OF_EXACT = tl.constexpr(EXACT_SLOTS)
EXACT_BLOCK = tl.constexpr(16)  # exact slots of a head, at most


@triton.jit
def slots_of(tile, room, limit, BLOCK_N: tl.constexpr, SHIFTED: tl.constexpr):
    """First slot of a tile, its slots, and which of them it reads.

    SHIFTED: a tile ends within `room`, and some of its slots may belong to the tile before, or to the head before.
    """
    start = tile * BLOCK_N
    if SHIFTED:
        start = tl.minimum(start, room - BLOCK_N)
    slots = start + tl.arange(0, BLOCK_N)
    there = slots < limit
    if SHIFTED:
        there = there & (slots >= tile * BLOCK_N)
    return start, slots, there


@triton.jit
def load_steps(pointers, slots, there):
    """The steps of a tile of slots, 0 where there are none."""
    if pointers is None:
        return 0.0
    else:
        return tl.load(pointers + slots, mask=there, other=0.0)


@triton.jit
def without_exact(
    tile, value, start, slots, exact_at, least_exact, most_exact, BLOCK_N: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """What belongs to the slots of a tile, `value` where a slot is exact; these are few and mostly lie in one tile."""
    if EXACT > 0:  # noqa: SIM102
        if (most_exact >= start) & (least_exact < start + BLOCK_N):
            for i in tl.static_range(EXACT):
                tile = tl.where(slots == tl.load(exact_at + i), value, tile)
    return tile


@triton.jit
def weights_of(
    base, tile, start, slots, limit, exact_at, least_exact, most_exact,
    MASKED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Base-2 log-weights of a tile of slots; -inf where there is none, another tile reads it, or it is exact."""
    weights = load_weights(base, slots, limit, MASKED)
    if SHIFTED:
        weights = tl.where(slots >= tile * BLOCK_N, weights, NEG_INF)
    return without_exact(weights, NEG_INF, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)


@triton.jit
def products_of_tile(
    q, lift, base, stride, start, limit, second, fields,
    BITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """<R q, z_i> of a tile of codes, half of it of words, or <q, k_i>, [rows, slots]."""
    if fields is not None:
        z = load_fields(base, start, stride, limit, fields, BLOCK_N, D, BLOCK_D).to(q[0].dtype)
        return products_with(z, q)
    elif len(q) == 4:
        words = load_words(base, start, stride, limit, second, BLOCK_N, D, BLOCK_D, BITS, MASKED)  # [BLOCK_N, BLOCK_D]
        return word_products(words, q, lift, BITS)
    elif BITS == 16:
        k = load_tile(base, start, stride, limit, BLOCK_N, D, BLOCK_D, MASKED)
        return dot(q[0], tl.trans(k), tl.zeros((q[0].shape[0], BLOCK_N), tl.float32))
    else:
        z = load_levels(base, start, stride, limit, BLOCK_N, D, BLOCK_D, BITS).to(q[0].dtype)
        return dot(q[0], tl.trans(z), tl.zeros((q[0].shape[0], BLOCK_N), tl.float32))


@triton.jit
def products_with(z, q):
    """<q, z_i> [rows, slots] of queries in one part, or in two that are summed: rounded, and the rest."""
    s = dot(q[0], tl.trans(z), tl.zeros((q[0].shape[0], z.shape[0]), tl.float32))
    if len(q) == 2:
        s = dot(q[1], tl.trans(z), s)
    return s


@triton.jit
def scores_of_products(
    s, step, q_center, scale, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides,
    WORDS: tl.constexpr,
):  # fmt: skip
    """log2(e) (s_i + bias_i) of a tile; of coded keys without <q, center>, unless it matters. q_center None: of plain
    keys.
    """
    if q_center is None:
        return finish_scores(
            s * scale, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides
        )
    else:
        step = step.to(tl.float32) * (2.0 if WORDS else 1.0)
        if softcap is not None or logits_ptr is not None:
            return finish_scores(
                (s * step[None, :] + q_center[:, None]) * scale, slots, there, softcap,
                logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides,
            )  # fmt: skip
        else:
            x = s * (step * (scale * LOG2E))[None, :]
            return add_bias(x, slots, there, row_inside[:, None] & there[None, :], bias, bias_strides)


@triton.jit
def add_tile_of_values(
    acc, terms, step, shrink, base, stride, start, limit, second, fields,
    DTYPE: tl.constexpr, BITS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, SHIFTED: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Sums [rows, channels] in one or four parts, or ACROSS [channels, 2 rows], with the values of a tile added."""
    shrink = of_rows(shrink, ACROSS)
    if len(acc) == 4:
        words = load_words(
            base, start, stride, limit, second, BLOCK_N, DV, BLOCK_DV, BITS, MASKED and not SHIFTED, ACROSS
        )  # fmt: skip
        parts, lift = value_operand(terms, 2.0 * step.to(tl.float32), DTYPE, ACROSS, BITS)
        return add_words(acc, parts, words, shrink, lift, ACROSS, BITS)
    elif BITS == 16:
        v = load_tile(base, start, stride, limit, BLOCK_N, DV, BLOCK_DV, MASKED)
        return (add_values(acc[0] * shrink, operand(terms, v.dtype, ACROSS), across(v, ACROSS), ACROSS),)
    else:
        if fields is not None:
            z = load_fields(base, start, stride, limit, fields, BLOCK_N, DV, BLOCK_DV).to(DTYPE)
        else:
            z = load_levels(base, start, stride, limit, BLOCK_N, DV, BLOCK_DV, BITS).to(DTYPE)
        parts = operand(terms * step.to(tl.float32)[None, :], DTYPE, ACROSS)
        return (add_values(acc[0] * shrink, parts, across(z, ACROSS), ACROSS),)


# A cache that grows by a slot per step must not compile a kernel per length.
@triton.jit(
    do_not_specialize=[
        "slots_total", "value_slots", "room", "queries", "weight_b", "weight_h",
        "k_step_b", "k_step_h", "v_step_b", "v_step_h",
    ]
)  # fmt: skip
def coded_split_kernel(
    q_ptr, keys, values, num_ptr, den_ptr, bias_ptr, length_ptr, pieces, pages, exact_ptr,
    logits_ptr, acc_ptr, sums_ptr,
    scale, softcap, slots_total, value_slots, room, queries, kv_heads,
    q_strides, bias_strides, weight_b, weight_h, k_step_b, k_step_h, v_step_b, v_step_h,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
    TIED: tl.constexpr, MASKED: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums over one piece of the slots of one KV head, as in `split_kernel`, with

        s_i = scale (<q, center> + step_i <R q, z_i>),   v_i = step_i z_i

    acc is of values around their center, in rotated coordinates. Exact slots are read by the first piece of a head.

    What never changes within a step is loaded before the kernel before has ended: centers, signs, the work list. Pages
    are known after that: what row b reads lies in page pages[0][b], and centers and exact slots of two pages are
    pages[1] numbers apart.
    """
    D: tl.constexpr = keys.size
    DV: tl.constexpr = values.size
    KEY_WORDS: tl.constexpr = keys.words
    VALUE_WORDS: tl.constexpr = values.words
    BLOCK_D: tl.constexpr = block_of(D // 4 if KEY_WORDS else D)
    BLOCK_DV: tl.constexpr = block_of(DV // 4 if VALUE_WORDS else DV)
    begin(OVERLAP, False)
    split, splits = tl.program_id(0), tl.num_programs(0)
    batch_head = tl.program_id(2)
    leads = split == 0
    first, last = 0, 0
    if pieces is not None:
        work = pieces[1] + tl.program_id(0).to(tl.int64) * 5
        batch_head = tl.load(work)
        from_slot, to_slot = tl.load(work + 1), tl.load(work + 2)
        split = tl.load(work + 3)
        leads = tl.load(work + 4) > 0
        # Pieces begin at a multiple of every tile size.
        first, last = from_slot // BLOCK_N, tl.cdiv(to_slot, BLOCK_N)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    # What a head has beside its slots: that of head `own`, behind the pages before it.
    own, beside_at, page = batch_head.to(tl.int64), tl.zeros([], tl.int64), b
    if pages is not None:
        begin(False, EARLY)
        page = tl.maximum(tl.load(pages[0] + b), 0)
        own, beside_at = h, page * pages[1]
    k_step, v_step, num_base, den_base = keys.step, values.step, num_ptr, den_ptr
    if pieces is not None:
        # Rows of a flat store begin where their head does.
        at = tl.load(pieces[0] + batch_head)
        room -= at.to(tl.int32)
        k_base, v_base = keys.data + at * keys.s, values.data + at * values.s
        k_step_at, v_step_at, weights_at = at, at, at
    else:
        k_base, v_base = keys.data + page * keys.b + h * keys.h, values.data + page * values.b + h * values.h
        k_step_at, v_step_at = page * k_step_b + h * k_step_h, page * v_step_b + h * v_step_h
        weights_at = b * weight_b + h * weight_h
    if k_step is not None:
        k_step += k_step_at
    if v_step is not None:
        v_step += v_step_at
    if num_ptr is not None:
        num_base += weights_at
    if den_ptr is not None:
        den_base += weights_at
    # Exact slots are read in the time that so many tiles take.
    WORTH: tl.constexpr = WORTH_OF_EXACT // BLOCK_N if EXACT > 0 else 0
    if pieces is None and length_ptr is None:
        tiles = tl.cdiv(slots_total, BLOCK_N)
        first = tl.maximum((tiles + WORTH) * split // splits - WORTH, 0)
        last = tl.maximum((tiles + WORTH) * (split + 1) // splits - WORTH, 0)
    if AHEAD > 0:
        at = first * BLOCK_N
        count = tl.minimum((tl.minimum(last - first, AHEAD)) * BLOCK_N, room - at)
        if count > 0:
            prefetch(k_base + at.to(tl.int64) * keys.s, count * keys.s, 2 if keys.bits == 4 else 1)
            prefetch(v_base + at.to(tl.int64) * values.s, count * values.s, 2 if values.bits == 4 else 1)
            prefetch(k_step + at, count, 2)
            prefetch(v_step + at, count, 2)
            if num_ptr is not None:
                prefetch(num_base + at, count, 4)
            if den_ptr is not None and not TIED:
                prefetch(den_base + at, count, 4)
    if keys.sign is not None:
        center = load_vector(keys.center + beside_at + own * D, D, BLOCK_D, keys.bits)
        sign = load_vector(keys.sign, D, BLOCK_D, keys.bits)
    if pages is None:
        begin(False, EARLY)
    if pieces is not None:  # noqa: SIM102
        if from_slot > to_slot:
            # A list of fixed length has entries that are none.
            return

    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside = row < GROUP * queries
    head_in_group = row // queries
    flat_row = batch_head.to(tl.int64) * (GROUP * queries) + row  # row of [B, Hq, N] outputs
    q_rows = q_ptr + b * q_strides[0] + h * GROUP * q_strides[1]
    q_rows += head_in_group * q_strides[1] + (row % queries) * q_strides[2]
    q_center, lift = None, None
    if keys.center is not None and keys.sign is None:
        q_center = tl.load(keys.center + flat_row, mask=row_inside, other=0.0)
    if KEY_WORDS:
        q = load_by_words(q_rows, row_inside, D, BLOCK_D, keys.bits)  # four parts [BLOCK_M, BLOCK_D]
        if keys.sign is not None:
            q, q_center = around(q, center, sign, D)
        q, lift = query_operands(q, HALF, keys.bits)  # four parts [BLOCK_D, 2 BLOCK_M], [2 BLOCK_M]
        if not VALUE_WORDS:
            # Programs of several warps: Triton 3.6 fails where the operand of their products comes from a reshape.
            q = (q[0] + tl.zeros_like(q[0]), q[1] + tl.zeros_like(q[1]), q[2] + tl.zeros_like(q[2]),
                 q[3] + tl.zeros_like(q[3]))  # fmt: skip
    elif keys.fields is not None and HALF is not None:
        # Learned directions differ in size: queries in them come in float32, and rounding them costs nothing.
        whole = load_columns(q_rows, row_inside, 0, 1, D, BLOCK_D)
        near = whole.to(HALF)
        q = (near, (whole - near.to(tl.float32)).to(HALF))
    else:
        q = (load_columns(q_rows, row_inside, 0, 1, D, BLOCK_D),)  # [BLOCK_M, BLOCK_D]
    DTYPE: tl.constexpr = q[0].dtype
    bias = bias_ptr
    if bias_ptr is not None:
        bias = bias_of_rows(bias_ptr, bias_strides, b, h, head_in_group, row % queries)

    limit = slots_total
    if pieces is not None:
        # Nothing behind a piece is its own, and the slots of its head need not be asked for.
        limit = to_slot
    elif length_ptr is not None:
        limit = tl.minimum(tl.load(length_ptr + batch_head).to(tl.int32), slots_total)
        tiles = tl.cdiv(limit, BLOCK_N)
        first = tl.maximum((tiles + WORTH) * split // splits - WORTH, 0)
        last = tl.maximum((tiles + WORTH) * (split + 1) // splits - WORTH, 0)
    value_limit = limit
    if value_slots is not None:
        value_limit = tl.minimum(limit, value_slots)
    value_tiles = tl.cdiv(value_limit, BLOCK_N)
    exact_at, least_exact, most_exact = exact_ptr, 0, 0
    if EXACT > 0:
        exact_at += beside_at + own * EXACT
        place = tl.arange(0, EXACT_BLOCK)
        least_exact = tl.min(tl.load(exact_at + place, mask=place < EXACT, other=2147483647), 0)
        most_exact = tl.max(tl.load(exact_at + place, mask=place < EXACT, other=-1), 0)

    num_origin, num_total = no_terms(BLOCK_M)
    den_origin, den_total = no_terms(BLOCK_M)
    zero = tl.zeros((BLOCK_DV, 2 * BLOCK_M) if KEY_WORDS else (BLOCK_M, BLOCK_DV), tl.float32)
    acc = (zero, zero, zero, zero) if VALUE_WORDS else (zero,)

    # Steps are too small for asynchronous copies: those of the next tile are asked for a tile ahead.
    _start, ahead, unread = slots_of(first, room, limit, BLOCK_N, SHIFTED)
    next_key_step = load_steps(k_step, ahead, unread)
    next_value_step = load_steps(v_step, ahead, unread & (ahead < value_limit))
    for tile in tl.range(first, tl.minimum(last, value_tiles), num_stages=STAGES):
        start, slots, there = slots_of(tile, room, limit, BLOCK_N, SHIFTED)
        key_step, value_step = next_key_step, next_value_step
        _start, ahead, unread = slots_of(tile + 1, room, limit, BLOCK_N, SHIFTED)
        next_key_step = load_steps(k_step, ahead, unread)
        next_value_step = load_steps(v_step, ahead, unread & (ahead < value_limit))
        if logits_ptr is not None:
            there = without_exact(there, False, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)
        s = products_of_tile(
            q, lift, k_base, keys.s, start, limit, keys.second, keys.fields, keys.bits, D, BLOCK_D, BLOCK_N,
            MASKED and not SHIFTED,
        )  # [BLOCK_M, BLOCK_N]  # fmt: skip
        x = scores_of_products(
            s, key_step, q_center, scale, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total,
            bias, bias_strides, KEY_WORDS,
        )  # fmt: skip
        weights = weights_of(
            num_base, tile, start, slots, value_limit, exact_at, least_exact, most_exact,
            MASKED, SHIFTED, BLOCK_N, EXACT,
        )  # fmt: skip
        x_num = x + weights[None, :]
        num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
        acc = add_tile_of_values(
            acc, terms, value_step, shrink, v_base, values.s, start, value_limit, values.second, values.fields,
            DTYPE, values.bits, DV, BLOCK_DV, BLOCK_N, MASKED, SHIFTED, KEY_WORDS,
        )  # fmt: skip
        if not TIED:
            x_den = x + weights_of(
                den_base, tile, start, slots, limit, exact_at, least_exact, most_exact, MASKED, SHIFTED, BLOCK_N, EXACT
            )[None, :]  # fmt: skip
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)
    if value_slots is not None:
        for tile in tl.range(tl.maximum(first, value_tiles), last, num_stages=STAGES):
            start, slots, there = slots_of(tile, room, limit, BLOCK_N, False)
            if logits_ptr is not None:
                there = without_exact(there, False, start, slots, exact_at, least_exact, most_exact, BLOCK_N, EXACT)
            s = products_of_tile(
                q, lift, k_base, keys.s, start, limit, keys.second, keys.fields, keys.bits, D, BLOCK_D, BLOCK_N, MASKED
            )
            x = scores_of_products(
                s, load_steps(k_step, slots, slots < limit), q_center, scale, slots, there, softcap,
                logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides, KEY_WORDS,
            )  # fmt: skip
            x_den = x + weights_of(
                den_base, tile, start, slots, limit, exact_at, least_exact, most_exact, MASKED, False, BLOCK_N, EXACT
            )[None, :]  # fmt: skip
            den_origin, den_total, _, _ = add_terms(den_origin, den_total, x_den)

    if EXACT > 0:  # noqa: SIM102
        if leads:
            exact_limit = limit
            if pieces is not None:
                exact_limit = tl.load(length_ptr + batch_head).to(tl.int32)
            place = tl.arange(0, EXACT_BLOCK)
            slots = tl.load(exact_at + place, mask=place < EXACT, other=-1)
            there = (slots >= 0) & (slots < exact_limit)
            # Exact vectors lie in order: they are asked for before it is known which slots they belong to.
            k_exact, k_places, k_row, k_there = k_base, slots, keys.s, there
            if keys.bits != 16:
                k_exact, k_places, k_row = keys.exact + beside_at + own * EXACT * D, place, D
                k_there = place < EXACT
            if KEY_WORDS:
                s = exact_products(load_by_words(k_exact + k_places * k_row, k_there, D, BLOCK_D, keys.bits), q)
            else:
                exact = gather_tile(k_exact, k_places, k_row, k_there, D, BLOCK_D)
                s = products_with(exact.to(DTYPE), q)
                if keys.fields is not None and HALF is not None:
                    s += products_with((exact - exact.to(DTYPE).to(tl.float32)).to(DTYPE), q)
            if q_center is not None and (softcap is not None or logits_ptr is not None):
                s += q_center[:, None]
            x = finish_scores(
                s * scale, slots, there, softcap, logits_ptr, flat_row, row_inside, slots_total, bias, bias_strides
            )  # [BLOCK_M, EXACT_BLOCK]
            valued = there
            if value_slots is not None:
                valued = there & (slots < value_slots)
            x_num = tl.where(valued[None, :], x, NEG_INF)
            if num_ptr is not None:
                x_num += tl.load(num_base + slots, mask=valued, other=0.0)[None, :] * LOG2E
            num_origin, num_total, terms, shrink = add_terms(num_origin, num_total, x_num)
            v_exact, v_places, v_row, v_there = v_base, slots, values.s, valued
            if values.bits != 16:
                v_exact, v_places, v_row = values.exact + beside_at + own * EXACT * DV, place, DV
                v_there = place < EXACT
            if VALUE_WORDS:
                v = load_by_words(v_exact + v_places * v_row, v_there, DV, BLOCK_DV, values.bits)
            else:
                v = (gather_tile(v_exact, v_places, v_row, v_there, DV, BLOCK_DV),)
            acc = add_exact(
                acc, operand(terms, DTYPE, KEY_WORDS), v, valued, of_rows(shrink, KEY_WORDS), KEY_WORDS
            )  # fmt: skip
            if not TIED:
                x = tl.where(there[None, :], x, NEG_INF)
                if den_ptr is not None:
                    x += tl.load(den_base + slots, mask=there, other=0.0)[None, :] * LOG2E
                den_origin, den_total, _, _ = add_terms(den_origin, den_total, x)

    if q_center is not None and softcap is None and logits_ptr is None:
        # <q, center> is in the logit of every slot alike.
        num_origin += q_center * (scale * LOG2E)
        den_origin += q_center * (scale * LOG2E)
    place = flat_row * splits + split
    if pieces is not None:
        place = split.to(tl.int64) * (GROUP * queries) + row
    rows = [once(part) if KEY_WORDS else part for part in acc]
    if VALUE_WORDS:
        store_by_words(acc_ptr + place * DV, rows, row_inside, DV, BLOCK_DV, values.bits)
    else:
        store_columns(acc_ptr + place * DV, rows[0], row_inside, 0, 1, DV, BLOCK_DV)
    store_sums(sums_ptr, place, num_origin, num_total, den_origin, den_total, row_inside, TIED)
