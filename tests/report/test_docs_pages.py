"""Every page that shows results is what the records say, and so all pages agree with each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvsketch import METHODS, advice
from kvsketch.cli.methods import describe
from kvsketch_lab import records, sizes
from kvsketch_lab.report import blocks, docs, papers, recall, recommend, streams
from kvsketch_lab.report.body import body
from kvsketch_lab.report.papers import CLOSE, FAILS, HOLDS, NOTHING
from tests.report.sample_records import record, write
from tests.report.test_papers import ALL

ROOT = Path(__file__).parents[2]
COMMAND = "run: kvsketch report --docs"
CELL = {"model": "m", "dtype": "bfloat16", "budgets_in": "tokens", "method": "snapkv", "budget": "1024"}


@pytest.fixture(scope="module")
def numbers() -> docs.Numbers:
    return docs.Numbers(ROOT, [describe(cls) for cls in METHODS.values()], sizes)


def test_every_page_is_written_from_the_records(numbers: docs.Numbers) -> None:
    written = docs.pages(ROOT, numbers)
    assert {path.name for path in written} >= {
        "README.md",
        "results.md",
        "recall.md",
        "long_contexts.md",
        "benchmarks.md",
        "out_of_memory.md",
        "many_users.md",
        "vllm_concurrency.md",
    }
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}; {COMMAND}"


def test_the_report_is_written_from_the_same_rows(numbers: docs.Numbers) -> None:
    folder = ROOT / "docs" / "report"
    drawn = sorted(path.relative_to(folder).as_posix() for path in (folder / "figures").glob("*"))
    report = (folder / "report.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^]]*\]\((figures/[^)]+)\)", report)
    assert sorted(shown) == drawn and all(name.endswith(".png") for name in drawn)
    assert report == blocks.markdown(body(numbers.contents, shown)) + "\n", COMMAND


def test_no_number_of_a_row_is_typed_by_hand() -> None:
    """Sentences about results stand between the marks; templates hold what papers report and settings, not results."""
    page = docs.BLOCK.sub("", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert not re.search(r"\d", page)
    from_papers = {
        "0.1",
        "0.5",
        "0.70",
        "0.98",
        "1.0",
        "0.68",
        "0.5.5",
        "5.2",
        "2.5",
        "1.5",
        "4,000",
        "16,000",
        "1,024",
        "6,000",
    }
    template = (Path(docs.__file__).parent / "templates" / "results.md").read_text(encoding="utf-8")
    typed = set(re.findall(r"(?<![\d/])\d+(?:[.,]\d+)+", re.sub(r"\{\{.*?\}\}", "", template, flags=re.DOTALL)))
    assert typed <= from_papers, typed - from_papers


def test_records_name_no_folder_of_a_machine(numbers: docs.Numbers) -> None:
    for each in numbers.everything:
        assert " /" not in each["command"] and "=/" not in each["command"], each["file"]


def test_the_table_in_the_library_is_what_the_records_give(numbers: docs.Numbers) -> None:
    written = (ROOT / "src" / "kvsketch" / advice.FILE).read_text(encoding="utf-8")
    assert written == recommend.file_text(numbers.everything)


Values = dict[str, papers.Value | None]


@pytest.fixture(scope="module")
def judged(numbers: docs.Numbers) -> list[tuple[papers.Claim, Values]]:
    """Every claim that has a rule, with its numbers."""
    return [
        (claim, {key: papers.value_of(numbers, each) for key, each in {**claim.ours, **claim.beside}.items()})
        for _, claim in ALL
        if claim.rule
    ]


def test_verdicts_follow_from_the_answers(judged: list[tuple[papers.Claim, Values]]) -> None:
    """Plain means over the questions of both sides, and how many standard errors they differ by."""
    seen = set()
    for claim, values in judged:
        verdicts = []
        for comparison in claim.comparisons():
            left, sign, factor, right = papers.parsed(comparison)
            verdicts.append(papers.holds(comparison, values))
            if verdicts[-1] == NOTHING:
                assert values[left] is None or (right in values and values[right] is None), (claim.at, comparison)
                continue
            far, errors = distance(values, left, factor, right)
            agrees = papers.COMPARE[sign](far, 0)
            assert agrees if verdicts[-1] == HOLDS else verdicts[-1] == CLOSE or not agrees, (claim.at, comparison)
            if errors is not None:
                assert errors < 3.5 if verdicts[-1] == CLOSE else errors > 1.4, (claim.at, comparison, errors)
        kind = papers.judged(claim, values)[0]
        worst = next(verdict for verdict in (NOTHING, FAILS, CLOSE, HOLDS) if verdict in verdicts)
        assert kind == worst, claim.at
        seen.add(kind)
    assert {HOLDS, FAILS, CLOSE} <= seen


def distance(values: Values, left: str, factor: float, right: str) -> tuple[float, float | None]:
    """left - factor * right on the questions of both, and that in standard errors of texts where they are paired."""
    one, other = values[left], values.get(right)
    assert one is not None
    if other is None:
        return one.estimate.value - factor * float(right), None
    theirs = {each.question: each for each in other.results}
    both = [(each, theirs[each.question]) for each in one.results if each.question in theirs]
    if (
        one.perplexity
        or 2 * len(both) < max(len(one.results), len(other.results))
        or len({o.place for o, _ in both}) > 1
    ):
        return one.estimate.value - factor * other.estimate.value, None
    texts: dict[Any, list[float]] = {}
    for ours, theirs_ in both:
        texts.setdefault(ours.text, []).append(ours.value - factor * theirs_.value)
    mean = sum(map(sum, texts.values())) / len(both)
    off = sum((sum(own) - mean * len(own)) ** 2 for own in texts.values()) ** 0.5 / len(both)
    return mean, abs(mean) / off if off > 1e-9 and len(texts) >= 5 else None


def test_every_verdict_turns_when_the_answers_do(judged: list[tuple[papers.Claim, Values]]) -> None:
    for claim, values in judged:
        for comparison in claim.comparisons():
            left, sign, _, _ = papers.parsed(comparison)
            if papers.holds(comparison, values) == NOTHING:
                continue
            more, less = (papers.holds(comparison, {**values, left: moved(values[left], by)}) for by in (1e3, -1e3))
            assert (more, less) == ((HOLDS, FAILS) if sign[0] == ">" else (FAILS, HOLDS)), (claim.at, comparison)
            unknown = {**values, left: None}
            assert papers.judged(claim, unknown)[0] == NOTHING, claim.at


def moved(value: papers.Value | None, by: float) -> papers.Value:
    """Every answer so much larger; a loss of nats by less, of which perplexities are exponentials."""
    assert value is not None
    step = by / 50 if value.perplexity else by
    results = tuple(each._replace(value=each.value + step * each.weight) for each in value.results)
    edges = [None if each is None else each + by for each in value.estimate]
    return value._replace(estimate=records.Estimate(*edges), results=results)  # type: ignore[arg-type]


# What the records say of claims whose verdict depends on how they are compared.
KNOWN = {
    "Fig. 11a over Quest": {HOLDS},
    "Fig. 11a over InfiniGen": {FAILS},
    "Fig. 13a, selection": {FAILS},
    "Fig. 13a, InfiniGen": {FAILS},
    "Fig. 12, clustering in all": {HOLDS},
    "Fig. 10": {FAILS},
    "as Fig. 8 left, own summary": {HOLDS},
    "norms and length": {HOLDS},
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_records_say(name: str, judged: list[tuple[papers.Claim, Values]]) -> None:
    own = [(claim, values) for claim, values in judged if name in (claim.claim, claim.at)]
    assert own and {papers.judged(claim, values)[0] for claim, values in own} == KNOWN[name]


def test_recall_is_compared_where_as_many_tokens_are_read(
    numbers: docs.Numbers, judged: list[tuple[papers.Claim, Values]]
) -> None:
    for claim, _ in judged:
        for comparison in claim.comparisons():
            pair = [claim.ours.get(name) for name in papers.parsed(comparison)[::3]]
            if all(each is not None and each.kind == "recall" for each in pair):
                read = [
                    numbers.values("recall", "tokens_read", **papers._where(numbers, each)) for each in pair if each
                ]
                assert read[0] == read[1] and len(set(map(tuple, read))) == 1, (claim.at, read)


def test_an_unknown_block_is_named(tmp_path: Path) -> None:
    for name in ("results/eval", "docs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- kvsketch report --docs: nothing -->\n<!-- end -->\n")
    with pytest.raises(
        ValueError, match="no template 'nothing'; a page may ask for: agents, agents_short, balance_theory"
    ):
        docs.pages(tmp_path)
    with pytest.raises(ValueError, match="run this where the repository is"):
        docs.Numbers(tmp_path / "docs")


def test_a_measurement_made_again_is_what_pages_show(tmp_path: Path) -> None:
    """A re-measured method replaces its old rows, also those of questions that were not asked again."""
    place = {
        "lines": 200,
        "model": docs.BIG.partition(" ")[0],
        "dtype": "bfloat16",
        "method": "uniform",
        "budget": "1/4",
    }
    old = [record("lines", {**place, "sample": f"question={n}", "score": 0.0}) for n in range(5)]
    new = [
        {
            **record("lines", {**place, "sample": f"question={n}", "score": 1.0}),
            "again": True,
            "identity": ["sample", *place],
        }
        for n in range(4)
    ]
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "eval").mkdir(parents=True)
    records.append(tmp_path / "results" / "eval" / "lines.jsonl", *old)
    assert docs.Numbers(tmp_path).values("lines", "(mean, count)", budget="1/4") == [(0.0, 5)]
    records.append(tmp_path / "results" / "eval" / "lines.jsonl", *new)
    assert docs.Numbers(tmp_path).values("lines", "(mean, count)", budget="1/4") == [(1.0, 4)]


def test_a_number_is_asked_for_by_kind_formula_and_selection(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "eval").mkdir(parents=True)
    steps = [("a", 1, 9.0), ("a", 1, 8.0), ("a", 2, 10.0), ("b", 1, None)]  # the first was timed again
    made = [record("decode", {"method": m, "batch": batch, "step_ms": ms}) for m, batch, ms in steps]
    write(tmp_path / "results" / "decode.jsonl", made)
    numbers = docs.Numbers(tmp_path)
    assert numbers.values("decode", "step_ms") == [8.0, 10.0], "what has no such number is left out"
    assert numbers.values("decode", "step_ms / batch", batch=[2, 3]) == [5.0]
    assert [each["method"] for each in numbers.select("decode", batch=1)] == ["a", "b"]
    assert numbers.values("decode", "step_ms", method="c") == [] == numbers.values("nothing/", "mean")


def test_steps_of_other_shapes_and_prompts_stay_apart(tmp_path: Path) -> None:
    """The page on benchmarks compares steps of one shape after its longest prompt; a paper may ask for any."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "eval").mkdir(parents=True)
    common = {"method": "full", "batch": 1, "floor_ms": None, "cache_bytes": 1, "failed": None}
    common |= {"p10_ms": 1.0, "p90_ms": 1.0}
    places = [("llama-3.1-8b", 32768, 5.0), ("llama-3.1-8b", 8192, 4.0), ("llama-2-7b", 65536, 9.0)]
    made = [record("decode", {**common, "shape": s, "prompt": p, "step_ms": ms}) for s, p, ms in places]
    write(tmp_path / "results" / "decode.jsonl", made)
    numbers = docs.Numbers(tmp_path)
    assert numbers.values("decode", "step_ms") == [5.0]
    assert numbers.values("decode_all", "step_ms") == [5.0, 4.0, 9.0]
    assert numbers.values("decode_all", "step_ms", shape="llama-2-7b") == [9.0]
    page = numbers.words("benchmarks")
    assert "| 1 | `full` | 5.00 |" in page and "| 1 | `full` | 9.00 |" not in page


def test_how_numbers_are_written() -> None:
    assert docs.number([0.5, 1.0], ".1f") == "0.5" and docs.number([], ".1f") == docs.average([], "d") == "not measured"
    assert docs.span([2.0, 1.0, 1.5], ".0f") == "1 to 2" and docs.span([2.01, 2.02], ".1f") == "2.0"
    assert docs.interval([records.Estimate(1.0, 0.5, None)], ".1f") == "1.0" and docs.times([1.0, 2.0], 3) == [3.0, 6.0]


def test_pages_ask_for_nothing_that_was_not_measured(numbers: docs.Numbers) -> None:
    """A field or a method that is misspelt; the vLLM tables and the pages of papers alone have gaps."""
    folder = Path(docs.__file__).parent / "templates"
    for path in set(folder.glob("[!mov]*.md")) - set(folder.glob("paper*.md")):
        assert numbers.words(path.stem, None).count(docs.NOTHING) <= path.read_text().count(docs.NOTHING), path.name


# streams beside exact prefills


def perplexity(text: int, position: int, nll: float | None, **more: Any) -> dict[str, Any]:
    runs = {"chunk_tokens": [64], "chunk_nll": [nll], "full_chunk_nll": [1.0]}
    outcome = {"failed": "MemoryError: no"} if nll is None else runs
    place = {"sample": f"text {text}", "protocol": "prefill", "steps": 64, "position": position}
    return record("perplexity", {**CELL, **place, **outcome, **more})


def line(question: int, score: float, **more: Any) -> dict[str, Any]:
    place = {"sample": f"lines=600 question={question}", "lines": 600, "max_new_tokens": 48}
    return record("lines", {**CELL, **place, "score": score, "prompt_tokens": 9012, "position": 7 * question, **more})


def read(folder: Path, name: str, result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    write(folder / f"{name}.jsonl", result)
    return records.read_folder(folder)


def test_models_and_lengths_stay_apart_and_samples_are_paired(tmp_path: Path) -> None:
    result = [perplexity(text, 8000, 1.0) for text in (1, 2, 3)]
    result += [perplexity(1, 16000, 2.0), perplexity(1, 8000, 3.0, model="other")]
    result += [perplexity(text, 8000, 2.0, chunk=2048) for text in (1, 2, 3, 4)]
    text = streams.tables(read(tmp_path, "perplexity", result))
    assert "#### m (bfloat16)" in text and "#### other (bfloat16)" in text
    head = "| method | budget | tokens | exact prefill | chunks of 2,048 | chunks of 2,048 - exact | samples |"
    assert head in text and "| method | budget | tokens | exact prefill | samples |\n" in text
    higher = "+4.67 [+4.67, +4.67]"
    assert f"| `snapkv` | 1024 | 8,000 | +0.00 [+0.00, +0.00] | {higher} | {higher} | 3 to 4 |" in text
    assert "| `snapkv` | 1024 | 16,000 | +4.67 |  |  | 1 |" in text
    assert streams.summary(records.read_folder(tmp_path), "perplexity", "m (bfloat16)").startswith("of 1 differences")


def test_a_retried_failure_counts_no_more_and_others_are_told(tmp_path: Path) -> None:
    again = [perplexity(1, 8000, None), perplexity(2, 8000, None), perplexity(1, 8000, 1.0)]
    assert "| 8,000 | +0.00 (1 failed) | 1 |" in streams.tables(read(tmp_path, "perplexity", again))


def test_answers_are_shown_with_the_tokens_that_lines_come_to(tmp_path: Path) -> None:
    result = [line(n, 1.0) for n in range(4)] + [line(n, float(n < 2), chunk=2048) for n in range(4)]
    text = streams.tables(read(tmp_path, "lines", result))
    (row,) = [each for each in text.splitlines() if each.startswith("| `snapkv`")]
    assert row.startswith("| `snapkv` | 1024 | 600 (9,000 tokens) | 1.00 [1.00, 1.00] | 0.50 [0.00, 1.00] | -0.50 [")


# errors on the page on recall, and benchmarks


def test_of_an_error_measured_twice_the_last_counts_and_other_settings_are_no_part(tmp_path: Path) -> None:
    data = {"model": "qwen2.5-coder-0.5b", "dtype": "float32", "tokens": 8192, "method": "quest", "budget": "1/4"}
    data |= {"tokens_read": 2064, "bytes": 3_000_000, "outcomes": {}, "layers": "0"}
    result = [record("attention_error", {**data, "mean": mean}) for mean in (0.9, 0.05)]
    result += [record("attention_error", {**data, "mean": 0.5, "dtype": "bfloat16", "method": "h2o"})]
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "eval").mkdir(parents=True)
    write(tmp_path / "results" / "attention_error.jsonl", result)
    rows = docs.Numbers(tmp_path).select("errors", model=recall.MODEL, overall=True)
    assert recall.table(rows).endswith("| recall | `quest` | .050 | 2064 | 3 |")
    assert [(row["method"], row["mean"]) for row in rows] == [("quest", 0.05)]


def test_the_last_record_of_a_benchmark_counts(tmp_path: Path) -> None:
    data = {"method": "full", "batch": 1, "prompt": 8, "p10_ms": 6.0, "p90_ms": 8.0, "failed": None}
    data |= {"floor_ms": 4.0, "cache_bytes": 2_000_000}
    for name in ("docs", "results/eval"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "results" / "decode.jsonl", [record("decode", {**data, "step_ms": ms}) for ms in (9.0, 7.0)])
    page = docs.Numbers(tmp_path).words("benchmarks")
    assert "| 1 | `full` | 7.00 | 6.00-8.00 | 4.00 | 1.00x |" in page
    assert "9.00" not in page


def test_promises_about_texts_of_several_lengths_have_a_table_each(tmp_path: Path) -> None:
    for name in ("docs", "results/eval"):
        (tmp_path / name).mkdir(parents=True)
    said = {"promised": 0.05, "text_kind": "lines", "loss": 0.0, "kept": 1.0, "right": 1.0, "full_right": 1.0}
    own = [
        record("promise", {"model": "m", "sample": "text=0", "tokens": tokens, "bytes": share, **said})
        for tokens, share in ((2048, 0.25), (8192, 0.5))
    ]
    write(tmp_path / "results" / "promise" / "promise.jsonl", own)
    short, long = docs.Numbers(tmp_path).words("promises").split("texts of 8192 tokens")
    assert "texts of 2048 tokens" in short and "| 5% | lines | 1 | 25.0% |" in short
    assert "| 5% | lines | 1 | 50.0% |" in long
