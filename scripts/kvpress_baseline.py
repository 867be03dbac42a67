"""What a user of NVIDIA's kvpress gets on the same questions and shapes. Run it in kvpress's own environment.

    pip install kvpress torch          # needs transformers below 5.3, so not beside kvsketch's own requirements
    PYTHONPATH=src:lab python scripts/kvpress_baseline.py speed --out results/kvpress.jsonl
    PYTHONPATH=src:lab python scripts/kvpress_baseline.py lines --model FOLDER --name NAME --out results/eval/kvpress
    PYTHONPATH=src:lab python scripts/kvpress_baseline.py asked --presses KVzipPress,SnapKVPress \
        --out results/evidence/kvpress -- leval --data DIR --tasks tpo --model NAME --bytes 1/8,1/16
    PYTHONPATH=src:lab python scripts/kvpress_baseline.py kept --model FOLDER --lines 50 --device cpu \
        --presses KVzipPress,SnapKVPress,ExpectedAttentionPress --out kept.pt
    python scripts/kvpress_baseline.py agree --model FOLDER --name NAME --device cpu --kept-file kept.pt \
        --presses KVzipPress,SnapKVPress,ExpectedAttentionPress --out results/kvpress        # kvsketch's environment

`speed`: prefill and eager decode step of an 8B shape with random weights, 32,768 tokens, 2,048 of them kept.
`lines`: the questions of `kvsketch eval lines`, in its record format, one by one (kvpress cannot read left-padded
batches), compressed after the whole prompt as there; the methods are named kvpress-SnapKVPress and so on.
`asked`: the unseen questions of an experiment of `kvsketch eval`, whose command line follows `--`: a text is compressed
once, then asked about. A share of the bytes is one of the tokens, over all layers and heads where they differ; at 16
bits the same, if bytes were freed. What the cache really holds is measured: a press whose heads differ, such as
KVzipPress, masks tokens and frees no byte, so its rows say 100%.
`kept` and `agree`: which tokens a press keeps of the first of these texts, and how many of them our method keeps at the
same number of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import re
import statistics
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvsketch_lab import records
from kvsketch_lab.lists import grouped

SETTING = (
    "model",
    "dtype",
    "budgets_in",
    "method",
    "budget",
    "sample",
    "max_new_tokens",
    "question",
    "lines",
    "primed",
    "kvpress",
)
PRESSES = "StreamingLLMPress,SnapKVPress,PyramidKVPress,ExpectedAttentionPress"


def pressed(model: Any, press: str, kept: Fraction) -> Any:
    """The context in which kvpress compresses a prefill to `kept` of it; "none": none."""
    if press == "none":
        return contextlib.nullcontext()
    import kvpress

    return getattr(kvpress, press)(compression_ratio=float(1 - kept))(model)


@contextlib.contextmanager
def with_positions(model: Any) -> Iterator[None]:
    """Hands attention layers the cache_position that presses read; transformers does so before 5.3 alone."""

    def add(module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "cache_position" not in named:
            seen = named["past_key_values"].get_seq_length(module.layer_idx)
            new = named["hidden_states"].shape[1]
            named["cache_position"] = torch.arange(seen, seen + new, device=named["hidden_states"].device)
        return arguments, named

    hooks = [layer.self_attn.register_forward_pre_hook(add, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def prefill(model: Any, ids: torch.Tensor, press: str, kept: Fraction) -> tuple[Any, torch.Tensor]:
    from transformers import DynamicCache

    cache = DynamicCache()
    with with_positions(model), pressed(model, press, kept):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return cache, logits


def cache_bytes(cache: Any) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


@torch.no_grad()
def speed(options: argparse.Namespace) -> None:
    from kvsketch_lab.benchmark.shapes import build

    model = build("llama-3.1-8b")
    ids = torch.randint(10, 10000, (1, options.tokens), device="cuda")
    for press in ["none", *options.presses.split(",")]:
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            cache, logits = prefill(model, ids, press, Fraction(options.kept, options.tokens))
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        steps = []
        for _ in range(12):
            start = time.perf_counter()
            answered(model, cache, [int(logits.argmax())], options.tokens, 1)
            torch.cuda.synchronize()
            steps.append(1e3 * (time.perf_counter() - start))
        data = {
            "press": press,
            "prompt": options.tokens,
            "kept": options.kept if press != "none" else options.tokens,
            "prefill_ms": statistics.median(times[1:]),
            "step_ms": statistics.median(steps[2:]),
            "cache_bytes": cache_bytes(cache),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        print(data, flush=True)
        records.append(options.out, records.make_record("kvpress", data | package_versions(), 0))


@torch.no_grad()
def lines(options: argparse.Namespace) -> None:
    from kvsketch_lab.evaluation import line_records

    model, tokenizer = loaded(options)
    work = [(int(n), q) for n in options.lines.split(",") for q in range(options.questions)]
    for size, number in tqdm(work, unit="question", disable=None):
        asked = line_records.generate(size, 0, number)
        ids = torch.tensor([chat_ids(tokenizer, asked.text + asked.question)], device=model.device)
        for press in options.presses.split(","):
            for budget in options.budgets.split(","):
                cache, logits = prefill(model, ids, press, Fraction(budget))
                stored, size_bytes = cache.layers[0].keys.shape[2], cache_bytes(cache)
                first = [int(logits.argmax())]
                tokens = [] if first[0] in ends_of(model) else answered(model, cache, first, ids.shape[1], 47)
                answer = tokenizer.decode(first + tokens, skip_special_tokens=True)
                result = re.findall(r"\d+", answer)
                data = {
                    "method": f"kvpress-{press}",
                    "budget": budget,
                    "sample": f"lines={size} question={number}",
                    "model": options.name,
                    "lines": size,
                    "dtype": str(model.dtype).removeprefix("torch."),
                    "max_new_tokens": 48,
                    "question": "seen",
                    "score": float(bool(result) and int(result[-1]) == asked.expected),
                    "answer": answer,
                    "tokens_stored": stored,
                    "device_bytes": size_bytes,
                    "host_bytes": 0,
                    "full_bytes": round(size_bytes / stored * ids.shape[1]),
                }
                out = Path(options.out) / "lines.jsonl"
                records.append(out, records.make_record("lines", data | package_versions(), 0, SETTING))


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    return model, AutoTokenizer.from_pretrained(options.model)


def chat_ids(tokenizer: Any, content: str) -> list[int]:
    turn = [{"role": "user", "content": content}]
    rendered = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    result: list[int] = tokenizer(rendered, add_special_tokens=False).input_ids
    return result


def ends_of(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return eos if isinstance(eos, list) else [eos]


def asked_of(tokenizer: Any, size: int, seed: int, text: int, count: int) -> tuple[list[Any], list[list[int]], int]:
    """Questions about one text, their prompts, and where those begin to differ: the end of what is compressed."""
    from kvsketch_lab.evaluation import line_records

    asked = [line_records.generate(size, seed, text, number) for number in range(count)]
    prompts = [chat_ids(tokenizer, each.text + each.question) for each in asked]
    beside = zip(*prompts, chat_ids(tokenizer, asked[0].text), strict=False)
    return asked, prompts, next(i for i, tokens in enumerate(beside) if len(set(tokens)) > 1)


def lengths_of(cache: Any) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


def answers_apart(
    model: Any, tokenizer: Any, cache: Any, rests: list[list[int]], position: int, count: int
) -> Iterator[str]:
    """The answer to each question, asked of the cache as it is behind the compressed `position` tokens."""
    lengths = lengths_of(cache)
    for rest in rests:
        yield tokenizer.decode(answered(model, cache, rest, position, count), skip_special_tokens=True)
        for layer, length in zip(cache.layers, lengths, strict=True):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def answered(model: Any, cache: Any, ids: list[int], position: int, count: int) -> list[int]:
    """Greedy tokens after new tokens that follow the compressed `position` ones."""
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in ends_of(model)):
        fed = torch.tensor([ids], device=model.device)
        where = torch.arange(position, position + len(ids), device=model.device)[None]
        logits = model(fed, past_key_values=cache, position_ids=where, logits_to_keep=1).logits[:, -1]
        position, ids = position + len(ids), [int(logits.argmax())]
        tokens += ids
    return tokens


@torch.no_grad()
def asked(options: argparse.Namespace) -> None:
    """The questions of an experiment, in its own records; a share of the bytes is one of the tokens."""
    experiment = made(options.experiment)
    experiment.open()
    texts = grouped(experiment.cells(), lambda cell: (cell.seed, experiment.text_of(cell)))
    for cells in tqdm(texts.values(), unit="text", disable=None):
        for press in options.presses.split(","):
            for budget in experiment.options.bytes.split(",") if press != "none" else [""]:
                ask_text(experiment, cells, press, budget, Path(options.out))


def made(arguments: list[str]) -> Any:
    """The experiment of a command line such as `leval --data DIR --bytes 1/8`."""
    from kvsketch_lab.commands import class_of
    from kvsketch_lab.options import command

    name = arguments[0]
    cls = class_of("evaluation", name)
    result: list[Any] = []
    command(name, cls.options_type(), lambda given: result.append(cls(given)) or 0, "").main(
        [*arguments[1:], "--methods", "full", "--question", "unseen"], standalone_mode=False
    )
    return result[0]


def ask_text(experiment: Any, cells: list[Any], press: str, budget: str, out: Path) -> None:
    """All questions about one text with one press."""
    questions = [experiment.aligned(experiment.ask(cell)) for cell in cells]
    end = len(questions[0].ids) - questions[0].asked
    context = torch.tensor([questions[0].ids[:end]], device=experiment.model.device)
    cache, _ = prefill(experiment.model, context, press, Fraction(budget or 1))
    lengths, held = lengths_of(cache), cache_bytes(cache)
    rests, count = [list(each.ids[end:]) for each in questions], experiment.options.max_new_tokens
    told = answers_apart(experiment.model, experiment.tokenizer, cache, rests, end, count)
    for cell, question, answer in zip(cells, questions, told, strict=True):
        own = cell.data | {"method": "full" if press == "none" else f"kvpress-{press}", "budget": budget}
        data = own | package_versions() | experiment.origin() | question.facts
        data |= {"score": experiment.score(answer, question.expected), "answer": answer, "expected": question.expected}
        data |= {"prompt_tokens": len(question.ids), "tokens_stored": max(lengths), "device_bytes": held}
        data |= {"host_bytes": 0, "full_bytes": round(held / sum(lengths) * len(lengths) * end)}
        record = records.make_record(experiment.kind(), data, cell.seed, (*own, "kvpress"))
        records.append(out / f"{experiment.kind()}.jsonl", record)


@torch.no_grad()
def kept(options: argparse.Namespace) -> None:
    """Which tokens [layers, heads, n] presses keep of a text, in a file for `agree`."""
    model, tokenizer = loaded(options)
    _, prompts, end = asked_of(tokenizer, int(options.lines), options.seed, 0, 2)
    context = torch.tensor([prompts[0][:end]], device=options.device)
    full, _ = prefill(model, context, "none", Fraction(1))
    result = {}
    for press in options.presses.split(","):
        for budget in options.budgets.split(","):
            cache, _ = prefill(model, context, press, Fraction(budget))
            masks = []
            for layer, whole, module in zip(cache.layers, full.layers, model.model.layers, strict=True):
                # A kept key is bit by bit the key of its token; a press whose heads differ names what it masks.
                mask = (
                    torch.cdist(whole.keys[0], layer.keys[0], compute_mode="donot_use_mm_for_euclid_dist") == 0
                ).any(-1)
                if (hidden := getattr(module.self_attn, "masked_key_indices", None)) is not None:
                    mask[hidden[1], hidden[2]] = False
                masks.append(mask)
            result[press, budget] = torch.stack(masks).cpu()
            print(press, budget, f"{result[press, budget].float().mean():.4f} of the tokens", flush=True)
    data = {"context": prompts[0][:end], "lines": int(options.lines), "seed": options.seed, "kept": result}
    torch.save(data | package_versions(), options.out)


# Ours with the settings of kvpress's defaults.
OURS = {"KVzipPress": "kvzip", "SnapKVPress": "snapkv:window=64", "ExpectedAttentionPress": "expected"}


@torch.no_grad()
def agree(options: argparse.Namespace) -> None:
    """How many of the tokens that presses keep our methods keep, at the same number of tokens."""
    from kvsketch import CompressedCache, prefill
    from kvsketch.decode.asking import repeat_instruction

    model, tokenizer = loaded(options)
    theirs = torch.load(options.kept_file, weights_only=True)
    ids = torch.tensor([theirs["context"]], device=options.device)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "#text#"}], tokenize=False)
    before = len(tokenizer(shown.partition("#text#")[0], add_special_tokens=False).input_ids)
    for (press, budget), mask in theirs["kept"].items():
        if press not in options.presses.split(",") or budget not in options.budgets.split(","):
            continue
        cache = CompressedCache(model, f"{OURS[press]}:budget={budget}")
        prefill(model, ids, cache, instruction=repeat_instruction(tokenizer))
        ours = torch.zeros_like(mask)
        for number, layer in enumerate(cache.slot_layers):
            index = layer.table.index_slots()[0].cpu()
            for head, slots in enumerate(index):
                ours[number, head, slots[slots >= 0]] = True
        both = (ours & mask).sum((1, 2)) / mask.sum((1, 2))  # [layers]
        alone = ours & ~mask
        data = {
            "method": OURS[press],
            "press": press,
            "budget": budget,
            "model": options.name,
            "lines": theirs["lines"],
            "prompt_tokens": mask.shape[2],
            "share_kept": float(mask.float().mean()),
            "share_ours": float(ours.float().mean()),
            "kept_by_both": float((ours & mask).sum() / mask.sum()),
            # KVzipPress does not repeat what a chat template says before the text, and so drops it; ours does.
            "ours_alone_before_text": float(alone[:, :, :before].sum() / alone.sum().clamp_min(1)),
            "by_layer": [round(float(share), 4) for share in both],
            "kvpress": theirs["kvpress"],
        }
        print(data, flush=True)
        records.append(Path(options.out) / "kept.jsonl", records.make_record("kept", data, theirs["seed"]))


def package_versions() -> dict[str, Any]:
    return {"kvpress": importlib.metadata.version("kvpress")}


COMMANDS = {"speed": speed, "lines": lines, "asked": asked, "kept": kept, "agree": agree}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--presses", default=PRESSES)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--kept", type=int, default=2048)
    parser.add_argument("--model", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--lines", default="200,400")
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--budgets", default="1/4")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kept-file", default="kept.pt")
    parser.add_argument("--out", required=True)
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.experiment = arguments[end + 1 :]
    COMMANDS[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
