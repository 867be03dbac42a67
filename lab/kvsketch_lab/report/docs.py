"""What is written for the pages of docs/: `kvsketch report --docs` writes tables, figures and sentences from results/,
and the tables of methods from their classes, which the command line hands in.

A page marks what is written for it:

    <!-- kvsketch report --docs: results -->
    ...
    <!-- end -->

What stands between comes from templates/results.md, a jinja2 template. A second word, as in `options snapkv`, is what
the template is about. Nothing else of a page is touched, and no number of a record is typed by hand. A template asks
for a number by what was measured, a field or a formula of fields, which of the measurements, and how it is written:

    {{ n.values("decode", "step_ms - floor_ms", batch=1, method=bounded) | span(".1f") }}

`Numbers.select` says what can be measured and selected, FILTERS how it is written; templates/macros.jinja has the
questions that pages ask often. Whole tables are functions of `equal_bytes`, `benchmarks` and so on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from statistics import stdev
from typing import Any

from kvsketch import advice
from kvsketch_lab import columns
from kvsketch_lab.lists import grouped
from kvsketch_lab.records import Estimate, Record, budget_value, interval_text, latest, mean, read_folder, write_whole
from kvsketch_lab.report import (
    agents,
    benchmark_figures,
    benchmarks,
    bfcl,
    bits,
    blocks,
    doubt,
    equal_bytes,
    evidence,
    evidence_picture,
    facts,
    figures,
    long_answers,
    palette,
    papers,
    ranking,
    recall,
    recommend,
    render,
    streams,
    vllm,
    vllm_answers,
)
from kvsketch_lab.report.contents import Contents, contents_of
from kvsketch_lab.report.drawn import drawn
from kvsketch_lab.report.kinds import BIG, KINDS, NOTHING, Data
from kvsketch_lab.report.rows import Row, is_overall

BLOCK = re.compile(r"(<!-- kvsketch report --docs: (\w+)(?: (\w+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
EQUAL_BYTES, ERRORS, KERNELS, DECODE = "equal_bytes", "errors", "attention_sizes", "decode"
# Parameters that most methods have with the same meaning and default; one page explains them.
COMMON = ("seed", "positions", "bits", "key_bits", "value_bits", "basis", "bytes")
# Of benchmarks, what the last record of counts; elsewhere of each method.
REPEATED = {
    DECODE: ("shape", "prompt", "method", "batch"),
    "recall": ("part", "contender", "clusters", "rounds", "budget", "batch"),
    "prefill": ("method", "beside"),
    "cpu": ("processor", "model", "method", "tokens", "threads"),
    "stream": ("method", "tokens"),
    "kvpress": ("press",),
}


def write(root: Path, methods: Sequence[Mapping[str, Any]], sizes: Any) -> list[Path]:
    """Writes every page and figure of a checkout; the files. `methods`: what their classes say of them; `sizes`: makes
    the tables of what fits on a GPU, for which it needs models.
    """
    numbers = Numbers(root, methods, sizes)
    looks = root / "lab" / "kvsketch_lab" / "report" / palette.FILE
    write_whole(looks, palette.look_file(methods).encode())
    table = root / "src" / "kvsketch" / advice.FILE
    write_whole(table, recommend.file_text(numbers.everything).encode())
    figures, report = drawn(root, lambda: _draw(root, numbers)), root / "docs" / "report"
    own = [path for path in figures if report in path.parents]
    texts = render.write_texts(numbers.contents, report, own, page=False)
    written = [write_whole(path, text.encode()) for path, text in pages(root, numbers).items()]
    return [looks, table, *texts, *figures, *written]


def _draw(root: Path, numbers: Numbers) -> list[Path]:
    """Draws all figures of a checkout."""
    report, _ = render.write_figures(numbers.contents, root / "docs" / "report")
    pictures = root / "docs" / "pictures"
    return [*report, *(write_whole(pictures / f"{name}.png", render.png(each)) for name, each in numbers.figures())]


def pages(root: Path, numbers: Numbers | None = None) -> dict[Path, str]:
    """Every page that has marks, as it should read."""
    numbers = numbers or Numbers(root)
    result = {}
    folders = [root / "docs", root / "docs" / "methods", root / "docs" / "papers"]
    for path in sorted([root / "README.md", *(page for folder in folders for page in folder.glob("*.md"))]):
        page = path.read_text(encoding="utf-8")
        if BLOCK.search(page):
            result[path] = BLOCK.sub(
                lambda block: f"{block[1]}\n{numbers.words(block[2], block[3])}\n\n{block[5]}", page
            )
    return result


class Numbers:
    """What templates ask for."""

    def __init__(self, root: Path, methods: Sequence[Mapping[str, Any]] = (), sizes: Any = None) -> None:
        if not (root / "results" / "eval").is_dir() or not (root / "docs").is_dir():
            raise ValueError(f"{root} has no results/eval and docs; run this where the repository is")
        self.results = root / "results"
        self.methods, self.sizes = methods, sizes
        self._pages = root / "docs" / "methods"

    @cached_property
    def everything(self) -> list[Record]:
        """All records of results/; each file is read once."""
        return read_folder(self.results, below=True)

    @cache  # noqa: B019
    def records(self, folder: str) -> list[Record]:
        """The records of a folder of results/ and of the folders in it; none where it is not there."""
        own = {name for name in {each["folder"] for each in self.everything} if f"{name}/".startswith(f"{folder}/")}
        return [record for record in self.everything if record["folder"] in own]

    @cached_property
    def benchmarks(self) -> list[Record]:
        """The records of results/ itself."""
        return self.records(".")

    @cached_property
    def contents(self) -> Contents:
        return contents_of(self.records("eval"), [])

    @cached_property
    def errors(self) -> Contents:
        """The attention errors that the page on recall speaks of."""
        return contents_of(
            [each for each in self.benchmarks if each["kind"].replace("-", "_") == "attention_error"], []
        )

    @cached_property
    def at_equal_bytes(self) -> list[equal_bytes.Cell]:
        """What held-out questions found at equal bytes."""
        return equal_bytes.cells(self.records("eval"))

    @cached_property
    def streamed(self) -> list[Record]:
        """The records that compare streams with exact prefills; of answers about lines the latter are in eval/."""
        own = self.records("stream_quality")
        wanted = {streams.asked(record) for record in own if record["kind"] == "lines"}
        exact = (record for record in self.records("eval") if record["kind"] == "lines")
        return [*own, *(record for record in exact if streams.asked(record) in wanted)]

    # what templates ask

    def select(self, kind: str, /, **where: Any) -> list[Data]:
        """The measurements of a kind whose fields are as `where` says: each the value given, or one of a list.

        A kind is an experiment of `kinds.KINDS` (fields of `Row`), "equal_bytes" (of its `Cell`), "errors" (of the page
        on recall), a kind of benchmark (the data of its last records; of "decode" those that the page on benchmarks
        compares; "decode_all" has all shapes and prompts, "recall_all" the benchmark of that name), or a folder of
        results/ such as "positions/".
        """
        method = where.get("method")
        # Most templates ask about one method.
        known = self._by_method(kind).get(method, []) if isinstance(method, str) else self._measured(kind)
        return _are_as(known, where)

    def methods_of(self, kind: str) -> list[str]:
        """The text forms of all methods that were measured."""
        return [method for method in self._by_method(kind) if method]

    @cache  # noqa: B019
    def _by_method(self, kind: str) -> dict[Any, list[Data]]:
        return grouped(self._measured(kind), lambda each: each.get("method"))

    def values(self, kind: str, formula: str, /, **where: Any) -> list[Any]:
        """A field, or a formula of fields, of the measurements that `select` finds; those without it are left out."""
        return [value for value, _ in self.measurements(kind, formula, **where)]

    def measurements(self, kind: str, formula: str, /, **where: Any) -> list[tuple[Any, Data]]:
        """The same values, each with all fields of its measurement."""
        compute = self._formula(formula)
        return [(value, each) for each in self.select(kind, **where) if (value := compute(each)) is not None]

    @cache  # noqa: B019
    def _formula(self, text: str) -> Any:
        return self._environment.compile_expression(text)

    def quotients(self, kind: str, one: str, other: str, /, **where: Any) -> str:
        """Means of one method over those of another, by budget: `0.88 (1/2), 0.95 (1/4)`."""
        ours, theirs = (
            {each["budget"]: each["mean"] for each in self.select(kind, method=m, **where)} for m in (one, other)
        )
        both = sorted(ours.keys() & theirs.keys(), key=budget_value, reverse=True)
        return ", ".join(f"{ours[budget] / theirs[budget]:.2f} ({budget})" for budget in both) or NOTHING

    def of_kind(self, kind: str) -> list[Data]:
        """The data of all records of a benchmark."""
        return [_data(record) for record in self.benchmarks if benchmarks.benchmark_of(record) == kind]

    def last(self, kind: str, keys: str = "method", /, having: str = "", without: str = "", **where: Any) -> list[Data]:
        """The last record of a benchmark for each value of the fields `keys`, of those that have one field, lack others
        and are as `where` says.
        """
        return benchmarks.last(self._chosen(kind, having, without, where), *keys.split())

    def beside(self, kind: str, keys: str, /, **where: Any) -> list[Data]:
        """Contenders of a benchmark in one row for each value of the fields `keys`."""
        return benchmarks.beside(self._chosen(kind, "", "", where), *keys.split())

    def _chosen(self, kind: str, having: str, without: str, where: Mapping[str, Any]) -> list[Data]:
        own = [d for d in _are_as(self.of_kind(kind), where) if not any(map(d.get, without.split()))]
        return [d for d in own if not having or d.get(having)]

    def table(self, rows: Iterable[Data], text: str) -> str:
        """A table of rows with the columns of a text (`kvsketch_lab.columns`), whose formulas may be any of fields, as
        in `values`; the format `code` writes a text as it was typed.
        """
        shown = columns.parse(text)
        return blocks.table([each.heading for each in shown], [[self._cell(c, row) for c in shown] for row in rows])

    def _cell(self, column: columns.Column, row: Data) -> str:
        from jinja2 import UndefinedError

        try:
            value = self._formula(column.formula)(row)
        except UndefinedError:
            value = None
        return blocks.Code(value) if column.form == "code" else column.text(value)

    @cache  # noqa: B019
    def _measured(self, kind: str) -> list[Data]:
        if kind in (known.name for known in KINDS):
            return _of_rows(self.contents, kind)
        if kind == ERRORS:
            return _of_rows(self.errors, "attention_error")
        if kind == EQUAL_BYTES:
            return [{**vars(cell), "column": cell.column, "mean": cell.value.value} for cell in self.at_equal_bytes]
        if kind.endswith("/"):
            return [_data(record) | {"kind": record["kind"]} for record in latest(self.records(kind[:-1]))]
        own = re.sub("_(sizes|all)$", "", kind)
        data = self.of_kind(own)
        if kind == KERNELS:
            return benchmarks.sizes(data)
        counted = benchmarks.usual_steps(data) if kind == DECODE else data
        return benchmarks.last(counted, *REPEATED.get(own, ("method",)))

    @cache  # noqa: B019
    def words(self, name: str, about: str | None = None) -> str:
        """A template, filled in; `about`: the method that it speaks of."""
        known = self._environment.list_templates(extensions=["md"])
        if f"{name}.md" not in known:
            raise ValueError(f"no template {name!r}; a page may ask for: {', '.join(each[:-3] for each in known)}")
        return self.fill(f"{name}.md", about=about)

    def fill(self, template: str, /, **values: Any) -> str:
        """A template of any name, filled in."""
        return str(self._environment.get_template(template).render(**values).strip())

    @cached_property
    def _environment(self) -> Any:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        result = Environment(
            loader=PackageLoader(__package__),
            undefined=StrictUndefined,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        tables = (
            agents, benchmarks, bfcl, bits, doubt, equal_bytes, evidence, facts, long_answers, papers, ranking, recall,
            streams, vllm, vllm_answers,
        )  # fmt: skip
        result.globals |= {module.__name__.rpartition(".")[2]: module for module in tables}
        result.globals |= {"n": self, "big": BIG, "sizes": self.sizes}
        result.filters |= FILTERS
        return result

    def options(self, method: str) -> Sequence[Mapping[str, Any]]:
        """The parameters of a method, as its class explains them."""
        return next(each["options"] for each in self.methods if each["name"] == method)

    def common_options(self) -> list[Mapping[str, Any]]:
        """The parameters that most methods have, as one of them explains them."""
        return [option for option in self.options("snapkv") if option["name"] in COMMON]

    def capabilities(self, method: str) -> Sequence[Mapping[str, Any]]:
        """What a method can do, and why not the rest."""
        return next(each["capabilities"] for each in self.methods if each["name"] == method)

    def method_link(self, name: str) -> str:
        """The name of a method, linked to its page where it has one."""
        return f"[{name}]({name}.md)" if (self._pages / f"{name}.md").is_file() else name

    def byte_models(self) -> list[str]:
        """The models with tables of equal bytes, the main one first."""
        known = {cell.model for cell in self.at_equal_bytes if cell.budget}
        return sorted(known, key=lambda model: (model != BIG, model))

    def figures(self) -> Iterator[tuple[str, Any]]:
        """The figures of docs/pictures by name."""
        yield from benchmark_figures.draw(self.benchmarks)
        if (run := agents.picture(self.records("agents"))) is not None:
            yield "agents", run
        drawn = [equal_bytes.picture(self.at_equal_bytes, model) for model in self.byte_models()[:1]]
        yield from (("bytes", figure) for figure in drawn if figure is not None)
        own = self.records("evidence")
        ranked = ranking.measured(own + self.records("outside"), self.records("eval"))
        pictures = [evidence_picture.picture(ranked, model) for model in evidence.models(evidence.shown(own))[:1]]
        yield from (("evidence", figure) for figure in pictures if figure is not None)
        for section in self.errors.sections:
            if section.kind.name == "attention_error":
                yield "attention_error", figures.attention_errors(section, recall.MODEL)


def _data(record: Record) -> Data:
    """What was measured, with which seed and by which command."""
    return {**record["data"], "seed": record.get("seed"), "command": record.get("command") or ""}


def _are_as(known: Sequence[Data], where: Mapping[str, Any]) -> list[Data]:
    """Those whose fields are as asked for, each the value given, or one of a list."""
    found = list(known)
    for name, value in where.items():
        wanted = value if isinstance(value, (list, tuple)) else (value,)
        found = [data for data in found if data.get(name) in wanted]
    return found


def _of_rows(contents: Contents, kind: str) -> list[Data]:
    """The rows of an experiment that have a result."""
    rows = [row for section in contents.sections if section.kind.name == kind for row in section.rows]
    return [_fields(row, row.mean) for row in rows if row.mean is not None]


def _fields(row: Row, value: float) -> Data:
    return {
        **vars(row),
        "setting": row.setting.removesuffix(f", {row.variant}"),
        "overall": is_overall(row.setting),
        "device_share": row.device_share,
        "host_share": row.host_share,
        "value": Estimate(value, row.low, row.high),
    }


# how numbers are written


def number(values: Sequence[Any], form: str, otherwise: str = NOTHING) -> str:
    """The first, or only, value."""
    return format(values[0], form) if values else otherwise


def average(values: Sequence[float], form: str) -> str:
    return format(mean(values), form) if values else NOTHING


def deviation(values: Sequence[float], form: str) -> str:
    """The standard deviation."""
    return format(stdev(values), form)


def span(values: Sequence[float], form: str) -> str:
    """The smallest and the largest: `0.6 to 0.8`."""
    return " to ".join(dict.fromkeys(format(end, form) for end in (min(values), max(values))))


def interval(values: Sequence[Estimate], form: str) -> str:
    """The first estimate with its interval."""
    return interval_text(values[0], form) if values else NOTHING


def perplexity(values: Sequence[float], form: str) -> str:
    """The exponential of the first loss."""
    return number([math.exp(value) for value in values], form)


def times(values: Sequence[float], factor: float) -> list[float]:
    return [factor * value for value in values]


FILTERS = {each.__name__: each for each in (number, average, deviation, span, interval, perplexity, times, math.log)}
