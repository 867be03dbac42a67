"""Captured decoding: one decode step recorded as a CUDA graph and replayed for every token.

An eager decode step on a fast GPU is bound by the host that launches its thousand kernels, whatever the cache holds.
A compressed cache has a fixed shape and is updated in place, so the whole step (model, cache update, compression,
choice of the token) can be recorded once. transformers prepares everything (`custom_generate`), so all arguments mean
what they mean in `model.generate`.

The life of a call: transformers prepares; prefill runs eagerly; the first decode steps run eagerly too, as warm-up;
then the step is recorded and replayed. A step in which a method does periodic work runs eagerly in between.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.cache import masks, rollback, streaming
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.doubt import Doubt, Watch
from kvsketch.cache.layer import SlotLayer
from kvsketch.decode import fused as fusion
from kvsketch.decode.sampling import Sampler, Seeded, unsupported
from kvsketch.ops.common import early_start
from kvsketch.slots import coding, in_place, short_rows
from kvsketch.slots import padding as left_padding
from kvsketch.slots.bytes import host_tensors
from kvsketch.slots.heads import spread_over
from kvsketch.slots.in_place import advance_together
from kvsketch.slots.table import SlotTable
from kvsketch.slots.tensors import plain

WARM_UP_STEPS = 2
NO_GRAPHS = "only CUDA has graphs"
OWN_LOOP = "needs a loop of its own"
_turns: dict[torch.device, threading.RLock] = {}


def generate(
    model: PreTrainedModel,
    inputs: Any,
    cache: CompressedCache,
    *,
    fused: bool = True,
    seed: int | None = None,
    doubt: bool = False,
    **options: Any,
) -> Any:
    """`model.generate(**inputs, past_key_values=cache, **options)` with captured decode steps; same tokens.

    `inputs` is a tensor of token ids or what a tokenizer returns. On a CPU the eager loop runs; where capture is
    impossible on a GPU (beams, an unusual option or model) it does too, with one warning that says why.

    `fused` lets kernels do the work of the decoder layers of known families. They add the same products in another
    order, so in half precision two tokens that are equally likely up to rounding may change places, as they may between
    batch sizes. `fused=False` captures the model's own modules: the tokens of `model.generate`, bit by bit, except
    where that reads an exact table with the model's own attention (method `full`, layers that recall methods read
    whole, prompts within the budget).

    With a `seed`, sampling draws the same tokens on every device, alone or in a batch, and those of `kvsketch serve`;
    without one it draws from torch's generator, as transformers does.

    With `doubt`, `cache.doubt()` says afterwards how unsure the model was of each row's answer; beams and assisted
    decoding leave none.
    """
    if not isinstance(cache, CompressedCache):
        raise ValueError(f"cache must be a kvsketch.CompressedCache, not {type(cache).__name__}")
    if not isinstance(inputs, (Tensor, Mapping)):
        raise ValueError(
            f"inputs must be token ids [batch, tokens] or what a tokenizer returns, not {type(inputs).__name__}; "
            'use tokenizer(text, return_tensors="pt").to(model.device)'
        )
    arguments = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if "input_ids" in arguments:
        streaming.require_ids(arguments["input_ids"])
    reason = impossible(model, cache, options)
    if seed is not None and reason is not None and reason.endswith(OWN_LOOP):
        raise ValueError(f"seed={seed} is for plain sampling, and {reason}; leave seed out and use torch.manual_seed")
    if reason is not None and reason is not NO_GRAPHS:
        _warn(reason)
    cache.watched = None
    own_generate: Any = model.generate  # which the type of a model does not name
    if reason is not None and (reason.endswith(OWN_LOOP) or (seed is None and not doubt)):
        return own_generate(**arguments, past_key_values=cache, **options)
    # transformers shows the streamer the prompt but does not hand it on to a custom loop.
    loop = functools.partial(
        _captured_loop, streamer=options.get("streamer"), fused=fused, seed=seed, captured=reason is None, doubt=doubt
    )
    # A graph records what the current device does.
    with torch.cuda.device_of(next(model.parameters())):
        return own_generate(**arguments, past_key_values=cache, custom_generate=loop, **options)


def impossible(model: Any, cache: CompressedCache, options: dict[str, Any]) -> str | None:
    """Why a step of this model, cache and options of generate cannot be captured; None when it can."""
    if cache.check:
        return "check=True looks at every key and value on the host"
    if len(cache.slot_layers) < len(cache.layers):
        return f"{cache.model_name} has sliding-window or linear layers, whose native caches cannot be captured"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{cache.model_name} takes no position_ids and counts positions on the host"
    if (spread := spread_over(model)) is not None:
        return f"the model is spread over {spread}, and a graph belongs to one device"
    configs = [options.get("generation_config"), model.generation_config]
    for option in ("num_beams", "assistant_model", "prompt_lookup_num_tokens", "return_dict_in_generate"):
        given = [options[option]] if option in options else [getattr(config, option, None) for config in configs]
        value = next((v for v in given if v is not None), None)
        if value not in (None, False, 1):
            return f"{option}={value!r} {OWN_LOOP}"
    if model.device.type != "cuda":
        return NO_GRAPHS
    return None


def _warn(reason: str) -> None:
    warnings.warn(f"kvsketch.generate runs the eager loop: {reason}", RuntimeWarning, stacklevel=3)


def _captured_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    fused: bool = True,
    seed: int | None = None,
    captured: bool = True,
    doubt: bool = False,
    **model_kwargs: Any,
) -> Tensor:
    """transformers' sampling loop, with the steps after prefill captured."""
    names = unsupported(logits_processor, stopping_criteria, input_ids.shape[1])
    mask, before = model_kwargs.get("attention_mask"), model_kwargs["past_key_values"].tokens_before
    names += ["synced_gpus"] * synced_gpus + _masked(mask, before)
    if seed is not None and generation_config.do_sample:
        logits_processor.append(Seeded(seed, len(input_ids), input_ids.device))
    if names and captured:
        _warn(f"{', '.join(names)} cannot be captured")
    cache, eos = model_kwargs["past_key_values"], generation_config._eos_token_tensor
    if doubt:
        cache.watched = Doubt(len(input_ids), input_ids.device)
    if names or not captured:
        if doubt:
            watch = Watch(cache.watched, eos)
            logits_processor.insert(0, watch.logits)
            stopping_criteria.append(watch.chosen)
        return type(model)._sample(
            model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
        )  # fmt: skip
    rollback.end_recording(cache.layers)
    sampler = Sampler(
        logits_processor, input_ids, stopping_criteria.max_length, eos, generation_config._pad_token_tensor,
        generation_config.do_sample, cache.watched,
    )  # fmt: skip
    turn = turn_of(model.device)
    with turn:
        logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
        sampler.before_step()
        token = sampler.choose(logits)
        # The ids may be new ones alone, behind what the cache had read before.
        longest = cache.tokens_seen + stopping_criteria.max_length - input_ids.shape[1]
        step = Step(model, cache, sampler, token, longest, fused)
    _stream(streamer, token)
    while sampler.length < stopping_criteria.max_length and not sampler.finished():
        with turn:
            step.run()
        _stream(streamer, step.token)
    if streamer is not None:
        streamer.end()
    return sampler.tokens()


def turn_of(device: torch.device) -> threading.RLock:
    """Held by the thread whose prompt or step is at work on the device.

    Threads share the device's stream, so little would run at the same time anyway. A step that is recorded next to
    another thread's prompt is spoilt when that one waits for the whole device, whatever the capture mode.
    """
    return _turns.setdefault(device, threading.RLock())


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's own is one for all devices, and open to everybody."""
    return torch.cuda.Stream(device)


def _masked(mask: Any, before: int) -> list[str]:
    """What a mask says that a captured step, which reads none, does not know: anything but left padding, behind the
    `before` tokens of a document.
    """
    if mask is None:
        return []
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return ["an attention_mask that is not [batch, tokens]"]
    hidden = masks.hidden_inside(mask[:, before:], mask.shape[1] - before)
    if hidden is None:
        return []
    return [f"an attention_mask that hides token {before + hidden[1]} inside batch row {hidden[0]}"]


def _stream(streamer: Any, token: Tensor) -> None:
    if streamer is not None:
        streamer.put(token.squeeze(1).cpu())


class SideStream:
    """The branch of a captured step on which layers compress while the model goes on: nobody reads a layer's slots
    again before the next step. On a CPU they follow one another.
    """

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self.tables = tables
        self.advancing: list[SlotTable] = []  # those of them that wait for the others
        self.stream = torch.cuda.Stream() if tables[0].device.type == "cuda" else None
        self.held: list[Any] = []

    @contextlib.contextmanager
    def after(self, *used: Any) -> Iterator[None]:
        """Work that starts after what the current stream has so far; `used` are its tensors, kept until the end."""
        with contextlib.ExitStack() as branch:
            if self.stream is not None:
                self.held.append(used)
                self.stream.wait_stream(torch.cuda.current_stream())
                branch.enter_context(torch.cuda.stream(self.stream))
                branch.enter_context(early_start.off())
            yield
            if len(self.advancing) == len(self.tables):
                self._advance()

    def join(self) -> None:
        """The current stream goes on after all of it."""
        if self.held and self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.held.clear()
        self._advance()

    def _advance(self) -> None:
        if self.advancing:
            advance_together(self.advancing)
            self.advancing.clear()


@contextlib.contextmanager
def side_stream(layers: Sequence[SlotLayer]) -> Iterator[None]:
    """Inside the block the layers compress on a side stream; the branches meet again at its end."""
    branch, forward = SideStream([layer.table for layer in layers]), layers[0].forward
    for table in branch.tables:
        table.forward.advancing = branch.advancing
    try:
        with forward.during(side_stream=branch):
            yield
    finally:
        branch.join()
        for table in branch.tables:
            table.forward.advancing = None


@contextlib.contextmanager
def recording(device: torch.device, pool: Any = None) -> Iterator[Any]:
    """The graph of what the block launches; nothing of it runs."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Threads outside kvsketch may allocate and launch meanwhile. Garbage is not collected: what this thread lets go
    # then, such as the graphs and pinned buffers of an engine that has ended, may spoil the recording.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, capture_stream(device), capture_error_mode="thread_local"):
            yield graph
    finally:
        if collects:
            gc.enable()


def read_token(
    model: Any, cache: CompressedCache, token: Tensor, position: Tensor, fused: bool, bounded: bool = True
) -> Tensor:  # [B, vocabulary]
    """One forward over a token of each row, [B, 1]; `bounded`: whether all tables are.

    A token below 0 is none: what its row does then is not read.
    """
    layer = cache.slot_layers[0]
    # Tables that are still exact are read under a mask.
    mask = None if bounded else left_padding.mask(layer.table.padding, layer.table.seen + 1, layer.table.before)
    kernels = fusion.fused(model) if fused else contextlib.nullcontext()
    with layer.forward.during(mask_free=True, short_mask=bounded), kernels:
        out = model(
            input_ids=token.clamp_min(0),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            attention_mask=None if mask is None else mask.long(),
        )
    return out.logits[:, -1]


class Step:
    """One decode step on fixed addresses: eager while warming up, then a graph."""

    def __init__(
        self,
        model: Any,
        cache: CompressedCache,
        sampler: Sampler,
        token: Tensor,
        max_length: int,
        fused: bool = True,
    ) -> None:
        self.model, self.cache, self.sampler, self.fused = model, cache, sampler, fused
        self.layers = cache.slot_layers
        self.token = token.clone()
        table = self.layers[0].table
        self.position = left_padding.positions(table.padding, torch.full_like(token, cache.tokens_seen))
        self.graph: Any = None
        self.addresses: list[int] = []
        self.ahead: tuple[bool, bool] | None = None
        self.steps = 0
        self.max_length = max_length - cache.tokens_before  # of the cache's own tokens
        self._make_room()

    def _make_room(self) -> None:
        """Slots for all tokens to come, so that a step is recorded once."""
        with plain():
            for layer in self.layers:
                if not coding.waits(layer.table):
                    layer.method.make_room(layer.table, self.max_length)

    def run(self) -> None:
        """Generates one token."""
        try:
            self._run()
        except BaseException:
            # The device may have gone further than the host has counted.
            self.cache._break_off("a captured decode step")
            raise

    def _run(self) -> None:
        self.sampler.before_step()
        bounded, due = self.ahead or self._look_ahead()
        if due:
            self._forward(bounded)
            if self.addresses != self._addresses():
                self.graph = None
        elif self.steps < WARM_UP_STEPS or not bounded:
            # As it will be recorded: a program that is first loaded during a capture may break it.
            with side_stream(self.layers) if bounded else contextlib.nullcontext():
                self._forward(bounded)
        else:
            if self.graph is None:
                # A text that was too short for codes has had them since.
                self._make_room()
                self.graph = self._record()
            self.graph.replay()
            for layer in self.layers:
                in_place.count_replayed(layer.table)
        # Those of exact tables run other programs than will be recorded.
        self.steps += bounded
        # While the device works.
        self.ahead = self._look_ahead()

    def _look_ahead(self) -> tuple[bool, bool]:
        """What the host must know of the next step: whether all tables are bounded, and a method has periodic work."""
        bounded = not any(layer.table.exact for layer in self.layers)
        # A row that is too short for codes gets them after some step.
        due = any(
            layer.method.maintenance_due(layer.table)
            or (layer.table.padding is not None and short_rows.are_there(layer.table))
            for layer in self.layers
        )
        return bounded, due

    def _forward(self, bounded: bool) -> None:
        logits = read_token(self.model, self.cache, self.token, self.position, self.fused, bounded)
        self.token.copy_(self.sampler.choose(logits))
        self.position += 1

    def _addresses(self) -> list[int]:
        tables = [layer.table for layer in self.layers]
        return [t.data_ptr() for table in tables for t in (*table.tensors(), *host_tensors(table))]

    def _record(self) -> Any:
        """Captures one step. Capture does not run it, so the host's counters are put back."""
        self.addresses = self._addresses()
        with recording(self.token.device) as graph, side_stream(self.layers):
            self._forward(bounded=True)
        for layer in self.layers:
            in_place.count_recorded(layer.table)
        return graph
