"""What is written for the pages of docs/: `kvsketch report --docs` writes tables, figures and sentences from results/,
and the tables of methods from their classes, which the command line hands in.

A page marks what is written for it:

    <!-- kvsketch report --docs: results -->
    ...
    <!-- end -->

What stands between comes from templates/results.md, a jinja2 template whose numbers are calls of `Numbers`. A second
word, as in `options snapkv`, is what the template is about. Nothing else of a page is touched, and no number of a
record is typed by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from statistics import stdev
from typing import Any

from kvsketch import advice
from kvsketch_lab.records import (
    FAILED,
    Estimate,
    Record,
    budget_value,
    interval_text,
    latest,
    mean,
    read_folder,
    write_whole,
)
from kvsketch_lab.report import (
    benchmark_figures,
    benchmarks,
    bits,
    blocks,
    equal_bytes,
    figures,
    palette,
    recall,
    recommend,
    render,
    streams,
    vllm,
)
from kvsketch_lab.report.contents import Contents, Section, gather
from kvsketch_lab.report.rows import Row, is_overall

BLOCK = re.compile(r"(<!-- kvsketch report --docs: (\w+)(?: (\w+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BIG = "qwen2.5-coder-1.5b (bfloat16)"
NOTHING = "not measured"
# The methods of the README's tables.
DROPPING = ("snapkv", "streamingllm", "keyformer", "balancekv", "subgen")
SHOWN = ("full", "clusterkv", "quest", *DROPPING)
BOUNDED = tuple(f"{name}:budget=2048" for name in DROPPING)


def _span(numbers: Iterable[float], form: str) -> str:
    """The smallest and the largest: `0.6 to 0.8`."""
    found = list(numbers)
    return " to ".join(dict.fromkeys(format(end, form) for end in (min(found), max(found))))


def write(root: Path, methods: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Writes every page and figure of a checkout; the files. `methods`: what their classes say of them."""
    numbers = Numbers(root, methods)
    looks = root / "lab" / "kvsketch_lab" / "report" / palette.FILE
    write_whole(looks, palette.look_file(methods).encode())
    table = root / "src" / "kvsketch" / advice.FILE
    write_whole(table, recommend.file_text(read_folder(root / "results", below=True)).encode())
    drawn = [write_whole(root / "docs" / "pictures" / f"{name}.png", render.png(f)) for name, f in numbers.figures()]
    report, _ = render.render(root / "results" / "eval", root / "docs" / "report", page=False, below=True)
    return [
        looks,
        table,
        *report,
        *drawn,
        *(write_whole(path, text.encode()) for path, text in pages(root, numbers).items()),
    ]


def pages(root: Path, numbers: Numbers | None = None) -> dict[Path, str]:
    """Every page that has marks, as it should read."""
    numbers = numbers or Numbers(root)
    found = {}
    for path in sorted([root / "README.md", *(root / "docs").glob("*.md"), *(root / "docs" / "methods").glob("*.md")]):
        page = path.read_text(encoding="utf-8")
        if BLOCK.search(page):
            found[path] = BLOCK.sub(
                lambda block: f"{block[1]}\n{numbers.words(block[2], block[3])}\n\n{block[5]}", page
            )
    return found


class Numbers:
    """What templates ask for, as text."""

    def __init__(self, root: Path, methods: Sequence[Mapping[str, Any]] = ()) -> None:
        if not (root / "results" / "eval").is_dir() or not (root / "docs").is_dir():
            raise ValueError(f"{root} has no results/eval and docs; run this where the repository is")
        self.results = root / "results"
        self.methods = methods
        self._pages = root / "docs" / "methods"

    @cached_property
    def contents(self) -> Contents:
        return gather(self.results / "eval", below=True)

    @cached_property
    def benchmarks(self) -> list[Record]:
        return read_folder(self.results)

    @cached_property
    def at_equal_bytes(self) -> list[equal_bytes.Cell]:
        """What held-out questions found at equal bytes."""
        return equal_bytes.cells(read_folder(self.results / "eval", below=True))

    @cached_property
    def streamed(self) -> list[Record]:
        """The records that compare streams with exact prefills; of answers about lines the latter are in eval/."""
        found = read_folder(self.results / "stream_quality", below=True)
        wanted = {streams.asked(record) for record in found if record["kind"] == "lines"}
        return [
            *found,
            *(r for r in read_folder(self.results / "eval") if r["kind"] == "lines" and streams.asked(r) in wanted),
        ]

    @cached_property
    def errors(self) -> Contents:
        """The records that the page on recall speaks of."""
        return gather(self.results)

    def words(self, name: str, about: str | None = None) -> str:
        """A template, filled in; `about`: the method that it speaks of."""
        from jinja2 import Environment, StrictUndefined

        path = resources.files("kvsketch_lab.report") / "templates" / f"{name}.md"
        if not path.is_file():
            known = sorted(each.name[:-3] for each in (resources.files("kvsketch_lab.report") / "templates").iterdir())
            raise ValueError(f"no template {name!r}; a page may ask for: {', '.join(known)}")
        environment = Environment(undefined=StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(path.read_text(encoding="utf-8")).render(n=self, about=about).strip()

    def figures(self) -> Iterator[tuple[str, Any]]:
        """The figures of docs/pictures by name."""
        yield from benchmark_figures.draw(self.benchmarks)
        drawn = [equal_bytes.picture(self.at_equal_bytes, model) for model in self.byte_models()[:1]]
        yield from (("bytes", figure) for figure in drawn if figure is not None)
        for section in self.errors.sections:
            if section.kind.name == "attention_error":
                yield "attention_error", figures.attention_errors(section, recall.MODEL)

    def options(self, method: str) -> Sequence[Mapping[str, Any]]:
        """The parameters of a method, as its class explains them."""
        return next(each["options"] for each in self.methods if each["name"] == method)

    def method_link(self, name: str) -> str:
        """The name of a method, linked to its page where it has one."""
        return f"[{name}]({name}.md)" if (self._pages / f"{name}.md").is_file() else name

    # rows

    def _section(self, kind: str, contents: Contents | None = None) -> Section | None:
        return next((s for s in (contents or self.contents).sections if s.kind.name == kind), None)

    def rows(self, kind: str, model: str = BIG, variant: str = "", **wanted: str) -> list[Row]:
        section = self._section(kind)
        found = [row for row in (section.rows if section else []) if row.model == model and row.variant == variant]
        return [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())]

    def _text(self, rows: Sequence[Row], form: str = ".2f", interval: bool = False) -> str:
        if not rows or rows[0].mean is None:
            return NOTHING
        row = rows[0]
        assert row.mean is not None
        return interval_text(Estimate(row.mean, *((row.low, row.high) if interval else (None, None))), form)

    # answers

    def lines(self, method: str, budget: str = "", *sizes: int, model: str = BIG, variant: str = "") -> str:
        """Right answers about so many lines, in the order asked: `0.98, 0.84`."""
        found = []
        for size in sizes or (200, 300, 400, 600):
            setting = ", ".join(filter(None, (f"lines {size:,}", variant)))
            found.append(self._text(self.rows("lines", model, variant, setting=setting, method=method, budget=budget)))
        return ", ".join(found)

    def asked(self, method: str, budget: str = "", size: int = 400, model: str = BIG, variant: str = "") -> str:
        """How many questions were answered, right or wrong."""
        setting = ", ".join(filter(None, (f"lines {size:,}", variant)))
        rows = self.rows("lines", model, variant, setting=setting, method=method, budget=budget)
        return str(rows[0].count) if rows else "0"

    def passkeys(self, method: str, budget: str = "", model: str = BIG, length: int | None = None) -> str:
        """`14 of 15`: passkeys found over all lengths and depths."""
        rows = [row for row in self.rows("needle", model, method=method, budget=budget) if not is_overall(row.setting)]
        rows = [row for row in rows if length is None or row.setting == f"length {length:,}"]
        asked = sum(row.count for row in rows)
        return f"{sum(round((row.mean or 0) * row.count) for row in rows)} of {asked}" if asked else NOTHING

    def bytes(self, method: str, budget: str = "", model: str = BIG, variant: str = "", host: bool = False) -> str:
        """Bytes on the device, or on the host, as a share of the full cache's."""
        rows = self.rows("lines", model, variant, method=method, budget=budget)
        shares = [row.host_share if host else row.device_share for row in rows if not is_overall(row.setting)]
        known = [share for share in shares if share is not None]
        return f"{mean(known):.0%}" if known else NOTHING

    # perplexity

    def perplexity(self, method: str, setting: str = "", model: str = BIG) -> str:
        """Deviation from the full cache with its interval, the setting that names a prefill unless another is given."""
        rows = [row for row in self.rows("perplexity", model, method=method) if setting in row.setting]
        return self._text(rows, "+.2f", interval=True)

    def perplexities(self, method: str) -> str:
        """Deviations in every usual setting of every model, and which of them the interval tells from 0."""
        section = self._section("perplexity")
        own = [row for row in (section.rows if section else []) if row.method == method and not row.variant]
        rows = [row for row in own if row.mean is not None]
        told = []
        for row in rows:
            outside = row.low is not None and row.high is not None and not row.low <= 0 <= row.high
            verdict = "outside the noise" if outside else "within the noise"
            told.append(
                f"{self._text([row], '+.2f', interval=True)} ({row.model.partition(' (')[0]}, {row.setting}: {verdict})"
            )
        return "; ".join(told) or NOTHING

    # attention errors and recall

    def quotients(self, model: str, setting: str, one: str = "balancekv", other: str = "uniform") -> str:
        """Errors of one method over those of another, by budget: `0.88 (1/2), 0.95 (1/4)`."""
        section = self._section("attention_error")
        rows = [row for row in (section.rows if section else []) if row.model == model and setting in row.setting]
        errors = {(r.method, r.budget): r.mean for r in rows if is_overall(r.setting) and r.mean}
        budgets = sorted({budget for method, budget in errors if method == one}, key=budget_value, reverse=True)
        both = [(b, errors[one, b], errors[other, b]) for b in budgets if (other, b) in errors]
        return ", ".join(f"{a / b:.2f} ({budget})" for budget, a, b in both) or NOTHING

    def recall(self, method: str, budget: str, model: str = BIG) -> str:
        return self._text(self.rows("recall", model, method=method, budget=budget))

    def hits(self, steps: int, method: str = "clusterkv", budget: str = "1024") -> str:
        """Share of the clusters a query reads that it read in the last steps, for each model."""
        found: dict[str, list[float]] = {}
        for record in latest(r for r in read_folder(self.results / "eval") if r["kind"] == "recall"):
            data = record["data"]
            if data.get("method") == method and data.get("budget") == budget and FAILED not in data:
                found.setdefault(str(data["model"]), []).append(data["cluster_hits"][str(steps)])
        return " and ".join(f"{mean(shares):.0%} ({model})" for model, shares in sorted(found.items())) or NOTHING

    # answers at equal bytes

    def byte_models(self) -> list[str]:
        """The models with tables of equal bytes, the main one first."""
        found = {cell.model for cell in self.at_equal_bytes if cell.budget}
        return sorted(found, key=lambda model: (model != BIG, model))

    def has_byte_picture(self) -> bool:
        """Whether a figure of them is drawn."""
        models = self.byte_models()[:1]
        return any(cell.model in models and cell.task in equal_bytes.DRAWN for cell in self.at_equal_bytes)

    def byte_tables(self, model: str = BIG) -> str:
        """A table for each share of the bytes."""
        return equal_bytes.tables(self.at_equal_bytes, model)

    def short_byte_tasks(self, model: str = BIG) -> str:
        """The tasks of README's table."""
        return " / ".join(equal_bytes.short_tasks(self.at_equal_bytes, model))

    def short_byte_table(self, model: str = BIG) -> str:
        """README's table."""
        return equal_bytes.short_table(self.at_equal_bytes, model)

    def short_byte_note(self, model: str = BIG) -> str:
        """What its stars mean."""
        return equal_bytes.short_note(self.at_equal_bytes, model)

    def unseen(self, method: str, share: str, *tasks: str) -> str:
        """Right answers at equal bytes to questions that come later, by task."""
        found = self._unseen(method, share)
        return ", ".join(f"{found[task].value.value:.2f}" if task in found else NOTHING for task in tasks)

    def unseen_bytes(self, method: str, share: str, task: str) -> str:
        """The device bytes behind such answers, of the full cache's."""
        found = self._unseen(method, share)
        return f"{found[task].bytes:.0%}" if task in found else NOTHING

    def _unseen(self, method: str, share: str) -> dict[str, equal_bytes.Cell]:
        wanted = (BIG, method, "unseen", share)
        return {c.task: c for c in self.at_equal_bytes if (c.model, c.method, c.question, c.column) == wanted}

    def fewest_questions(self, model: str = BIG) -> str:
        return equal_bytes.least_questions(self.at_equal_bytes, model)

    # whole tables

    def benchmark_page(self) -> str:
        return benchmarks.page(self.benchmarks)

    def vllm_table(self) -> str:
        return vllm.table(self.benchmarks)

    def vllm_documents(self) -> str:
        return vllm.documents(self.benchmarks)

    def stream_tables(self) -> str:
        return streams.tables(self.streamed)

    def stream_summary(self, kind: str, model: str = BIG) -> str:
        """How many differences between streamed and exact prefill the intervals tell from zero."""
        return streams.summary(self.streamed, kind, model)

    def positions_table(self) -> str:
        """Perplexity at positions inside and beyond the trained ones, of the full cache and by `positions`."""
        found: dict[int, dict[str, float]] = {}
        for record in latest(read_folder(self.results / "positions")):
            data = record["data"]
            row = found.setdefault(data["position"], {"full": math.exp(data["full_nll"])})
            row["cache" if "positions=cache" in data["method"] else "text"] = math.exp(data["nll"])
        names = ("full", "text", "cache")
        rows = [[f"{at:,}", *(f"{row[name]:,.1f}" for name in names)] for at, row in sorted(found.items())]
        return blocks.table(
            ["tokens read", "full cache", blocks.Code("positions=text"), blocks.Code("positions=cache")], rows
        )

    def sampling_table(self) -> str:
        """Errors of SubGen's forms and of uniform sampling, mean and deviation over seeds."""
        found: dict[str, dict[str, list[float]]] = {}
        for record in latest(read_folder(self.results / "subgen_sampling")):
            data = record["data"]
            found.setdefault(data["method"], {}).setdefault(data["budget"], []).append(data["mean"])
        budgets = sorted({b for by in found.values() for b in by}, key=budget_value, reverse=True)
        rows = [
            [blocks.Code(method), *(f"{mean(by[b]):.2f} ± {stdev(by[b]):.2f}" for b in budgets)]
            for method, by in found.items()
        ]
        return blocks.table(["middle tokens kept", *budgets], rows)

    def bits_tables(self) -> str:
        """What few bits cost, by model."""
        folder = self.results / "bits"
        return (bits.tables(read_folder(folder)) if folder.is_dir() else "") or f"{NOTHING.capitalize()} yet."

    def recall_table(self) -> str:
        section = self._section("attention_error", self.errors)
        return recall.table(section.rows) if section else NOTHING

    def error(self, method: str, budget: str) -> str:
        """Error of the attention output on the page on recall."""
        section = self._section("attention_error", self.errors)
        return recall.error(section.rows if section else [], method, budget)

    def error_quotient(self, one: str, other: str) -> str:
        """Errors of one method over those of another on the page on recall, by budget."""
        section = self._section("attention_error", self.errors)
        return recall.quotients(section.rows if section else [], one, other)

    def samples(self) -> str:
        """How many seeds and questions stand behind the answers about lines."""
        return str(max((row.count for row in self.rows("lines") if not is_overall(row.setting)), default=0))

    def cost_table(self, tokens: int = 2048, prompt: int = 32_768) -> str:
        """Answers and speed of the same methods at the same budget, a share of the prompt in both experiments."""
        share = f"1/{prompt // tokens}"
        decoded, prefilled = self._timed("decode", "batch"), self._timed("prefill")
        batches = (1, 16, 64)
        rows = []
        for name in SHOWN:
            text, budget = (name, "") if name == "full" else (f"{name}:budget={tokens}", share)
            steps = [decoded[text, batch]["step_ms"] for batch in batches]
            read = prefilled[text,]
            rows.append(
                [
                    blocks.Code(name),
                    *(self.lines(name, budget, size) for size in (200, 600)),
                    self.passkeys(name, budget),
                    *(f"{ms:.2f}" if ms else "does not fit" for ms in steps),
                    f"{read['overhead']:+.1%}",
                    f"{read['cache_bytes'] / 1e6:,.0f}",
                ]
            )
        head = ["200 lines", "600 lines", "passkeys", *(f"step, batch {batch}, ms" for batch in batches)]
        return blocks.table([f"{share} of the tokens", *head, "prefill", "cache, MB"], rows)

    def _timed(self, kind: str, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The last record of each method, and of each of `keys` with it."""
        found = [record["data"] for record in self.benchmarks if record["kind"] == kind]
        return {tuple(data[key] for key in ("method", *keys)): data for data in found}

    # speed of the README's bounded methods, unless others are named

    @cached_property
    def _steps(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {key: data for key, data in self._timed("decode", "batch").items() if data["step_ms"]}

    def step(self, method: str, batch: int = 1) -> str:
        """Milliseconds of a decode step."""
        return f"{self._steps[method, batch]['step_ms']:.2f}"

    def rate(self, batch: int, *methods: str) -> str:
        """Tokens per second over those of the full cache at its best batch: `8.0 to 8.2`."""
        best = 1 / self._least_full()[0]
        return _span((batch / self._steps[method, batch]["step_ms"] / best for method in methods or BOUNDED), ".1f")

    def best_batch(self) -> str:
        return str(self._least_full()[1])

    def _least_full(self) -> tuple[float, int]:
        """The fewest milliseconds of the full cache for a token, and the batch."""
        return min((data["step_ms"] / batch, batch) for (name, batch), data in self._steps.items() if name == "full")

    def floor(self, batch: int) -> str:
        return _span((self._steps[method, batch]["floor_ms"] for method in BOUNDED), ".1f")

    def above_floor(self, batch: int) -> str:
        found = (self._steps[method, batch] for method in BOUNDED)
        return _span((data["step_ms"] - data["floor_ms"] for data in found), ".1f")

    def checked(self, what: str) -> str:
        """How many tokens, or layers, were compared before a step was timed."""
        return _span((data[f"checked_{what}"] for data in self._steps.values() if data[f"checked_{what}"]), "d")

    def rehearsal(self, method: str = "rehearse") -> str:
        """What rehearse adds to a prefill."""
        return f"{self._timed('rehearse')[method,]['overhead']:.0%}"

    def kvpress_step(self) -> str:
        data = (record["data"] for record in self.benchmarks if record["kind"] == "kvpress")
        return _span((each["step_ms"] for each in data if each["press"] != "none"), ".0f")

    @cached_property
    def _kernels(self) -> list[dict[str, dict[str, Any]]]:
        """What contenders needed, at each size."""
        data = [record["data"] for record in self.benchmarks if record["kind"] == "kernel"]
        return [by_name for _, by_name in benchmarks.contenders(data)]

    def beside_sdpa(self) -> str:
        return _span((ratio for each in self._kernels if (ratio := benchmarks.beside_sdpa(each))), ".2f")

    def four_bits(self, contender: str) -> str:
        """How many times as fast as bf16 slots of equal heads."""
        shown = (each for each in self._kernels if set(benchmarks.FEW_BITS) <= set(each))
        return _span((each["tied weights"]["median_us"] / each[contender]["median_us"] for each in shown), ".1f")

    def million(self, what: str) -> str:
        """Seconds of a streamed prompt of a million tokens, or its gigabytes."""
        number: float = self._timed("stream", "tokens")[BOUNDED[1], 1_000_000][what]
        return f"{number:.1f}" if what == "prefill_s" else f"{number / 1e9:.0f}"

    def budget_table(self) -> str:
        """Right answers by what is kept, for the methods of the README that drop tokens."""
        budgets = ("1/2", "1/4", "1/8", "1/16")
        rows = [[blocks.Code(name), *(self.lines(name, budget, 200) for budget in budgets)] for name in DROPPING]
        return blocks.table(["kept", *budgets], rows)
