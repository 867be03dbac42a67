"""Every number of a paper has a line on its page, a line asks only for what can be recorded, and intervals decide.

That the verdicts on the pages follow from the records is tested in test_docs_pages, where all records are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvsketch.compare.budgets import with_budget
from kvsketch.methods import parse_method
from kvsketch_lab import records
from kvsketch_lab.commands import EXPERIMENTS
from kvsketch_lab.evaluation.leval import TASKS
from kvsketch_lab.records import Estimate, Result, mean_over_texts
from kvsketch_lab.report import docs, papers
from kvsketch_lab.report.kinds import ALL_TASKS, KINDS
from kvsketch_lab.report.papers import CLOSE, FAILS, HOLDS, NOTHING, OTHER, Ask, Claim, Value, ask
from tests.report.sample_records import record

ROOT = Path(__file__).parents[2]
# The tables, figures, theorems and numbers of each paper.
LISTED = {
    "subgen": (
        "Lemma 1|Lemma 2|Theorem 1|Eq. (3)|Corollary 1|SubGen Fig. 1|SubGen Table 1|ClusterGen Fig. 1|ClusterGen B.1|"
        "ClusterGen Table 1|ClusterGen Table 2|ClusterGen Table 3|5k|7k|9k|65%|58%|49%|15.753|13.576|15.381|23.800|"
        "5.98|13.78|20.98|.98|.56|.66|.86|1.0|.58|.68|.38|.44|1.51 GB|2.35|2.01 GB|3.49|2.26 GB|4.61|10%|0.35|20,000"
    ),
    "balancekv": (
        "Theorem 3.1|Theorem 3.2|Theorem 3.3|Theorem 3.4|Eq. (2)|Fig. 1|Fig. 2|T = 1|T = 2|T = 3|T = 4|Table 1|45.71|"
        "45.32|26.69|68.62|59.25|46.17|48.63|36.80|41.54|18.91|64.88|59.68|42.38|44.03|38.23|42.61|19.07|64.65|59.60|"
        "43.28|44.57|27.86|39.05|20.70|66.16|58.37|42.91|42.51|37.17|42.66|24.31|65.09|58.30|41.40|44.82|36.97|42.37|"
        "23.82|65.49|58.46|42.82|44.99"
    ),
    "clusterkv": (
        "Fig. 1, 2, 4 to 8|Fig. 3a|Fig. 3b|Fig. 9|Fig. 10|Fig. 11a|Fig. 11b|Fig. 12|Fig. 13a|Fig. 13b|Table I|0.5|"
        "about 4|about 2|C0|400|2 times|2.5 times|6 to 8%|2.3 times|5%|63%|74%|2.3 and 3|320|L / 80|512 threads|"
        "budget 256|budget 2,048"
    ),
    "keyformer": (
        "Fig. 1 left|Fig. 1 right|Fig. 2, 5, 6|Fig. 3 left|Fig. 3 right|Fig. 4|Fig. 7|Fig. 8 left|Fig. 8 right|40%|"
        "90%|70%|19.8|19.9|15.4|15.8|17.5|17.6|12.3|3.7|7.3|10.53|7.03|8.29|9.94|9.64|10.46|6.90|6.95|9.62|8.69|9.27|"
        "1.12|1.28|1.37|1.62|1.71|2.05|2.1 times|2.4 times|1 rising to 2"
    ),
}
SETTINGS = {
    "lines": r"lines [\d,]+",
    "recall": r"tokens [\d,]+",
    "perplexity": r"prefill, \d+ steps",
    "attention_error": r"(mean over layers [\d,]+|layer \d+), [\d,]+ tokens(, protocol of balancekv)?",
    "leval": "|".join([ALL_TASKS, *TASKS]),
    "summaries": r"[\d,]+ tokens(, from \w+\.jsonl(, beside a reference)?)?",
}


def pages() -> dict[str, papers.Page]:
    """The pages as they are without any record."""
    numbers = docs.Numbers(ROOT)
    numbers.everything = []
    return {page.name: page for page in papers.index(numbers)}


PAGES = pages()
ALL = [(page.name, claim) for page in PAGES.values() for claim in page.claims]
ASKS = [(name, claim.at, each) for name, claim in ALL for each in {**claim.ours, **claim.beside}.values()]


@pytest.mark.parametrize("name", papers.PAPERS)
def test_every_table_figure_theorem_and_number_has_a_line(name: str) -> None:
    page = PAGES[name]
    titles = re.findall(r"^## (.*)$", page.text, re.MULTILINE)
    text = "\n".join(titles + [f"{c.at} {c.says} {c.setting} {c.why}" for c in page.claims])
    missing = [each for each in LISTED[name].split("|") if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", text)]
    assert not missing


def test_a_claim_is_decided_in_one_way() -> None:
    for name, claim in ALL:
        ways = [claim.rule, claim.verdict, claim.test]
        assert sum(map(bool, ways)) <= 1, (name, claim.at)
        assert not claim.verdict or claim.verdict in papers.VERDICTS
        assert not claim.rule or claim.ours, (name, claim.at)


def test_rules_name_numbers_that_their_claim_has() -> None:
    for name, claim in ALL:
        known = {**claim.ours, **claim.beside}
        for comparison in claim.comparisons():
            left, sign, factor, right = papers.parsed(comparison)
            assert left in known and sign in papers.COMPARE and factor > 0, (name, comparison)
            assert right in known or float(right) > 0, (name, comparison)
        assert "window" not in claim.rule or "window" in claim.says, (name, claim.at)


def test_claims_ask_for_what_an_experiment_can_record() -> None:
    kinds = {kind.name for kind in KINDS}
    for name, at, each in ASKS:
        for one in (each, each.over) if each.over else (each,):
            check_ask(one, kinds, f"{name}, {at}")


def check_ask(one: Ask, kinds: set[str], place: str) -> None:
    method = str(one.where.get("method", "full"))
    text = method.replace(":locality=0.96", "")  # of the benchmark alone
    parse_method(with_budget(text, one.where.get("budget", "") if one.kind in kinds else ""))
    if one.kind in kinds:
        assert re.fullmatch(SETTINGS[one.kind], one.where["setting"]), (place, one.where)
        assert one.where["model"].partition(" ")[0] in ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m")
        assert bool(one.where["budget"]) == (method != "full"), (place, one.where)
    elif one.kind in ("keyformer_tau/", "kept_mass/"):  # records of their own
        assert one.formula in ("score", "mass"), place
    elif one.kind.endswith("/"):
        assert one.where["kind"].replace("_", "-") in EXPERIMENTS or one.where["kind"] in EXPERIMENTS, place
    else:
        assert one.kind in ("decode_all", "recall_all", "prefill", "offload"), place


def test_tests_that_pages_name_exist() -> None:
    for name, claim in ALL:
        if claim.test:
            file, _, function = claim.test.partition("::")
            assert f"\ndef {function}(" in (ROOT / file).read_text(encoding="utf-8"), (name, claim.test)


def value(middle: float, half: float | None = None) -> Value:
    edges = (None, None) if half is None else (middle - half, middle + half)
    return Value(Estimate(middle, *edges), 50, "")


def test_intervals_decide() -> None:
    near = {"a": value(0.5, 0.1), "b": value(0.4, 0.1)}
    assert papers.holds("a > b", near) == papers.holds("b > a", near) == CLOSE
    far = {"a": value(0.5, 0.05), "b": value(0.4, 0.05)}
    assert papers.holds("a > b", far) == HOLDS and papers.holds("b > a", far) == FAILS
    assert papers.holds("a >= 0.44", far) == HOLDS and papers.holds("a >= 0.47", far) == CLOSE
    assert papers.holds("a <= 2 * b", far) == HOLDS and papers.holds("a > c", {**far, "c": None}) == NOTHING
    exact = {"a": value(2.0), "b": value(2.0)}
    assert papers.holds("a >= b", exact) == HOLDS and papers.holds("a > b", exact) == FAILS
    with pytest.raises(ValueError, match="'a is b' is no comparison; write: name > name"):
        papers.holds("a is b", exact)


def test_one_comparison_that_fails_is_enough() -> None:
    claim = Claim("at", "says", "", {"a": ask("x"), "b": ask("x"), "c": ask("x")}, rule="a > b and b > c")
    values: dict[str, Any] = {"a": value(3.0), "b": value(1.0), "c": value(2.0)}
    assert papers.judged(claim, values) == (FAILS, "a > b, holds; b > c, does not hold")
    assert papers.judged(claim, {**values, "c": value(0.5)}) == (HOLDS, "")
    assert papers.judged(claim, {**values, "c": None}) == (NOTHING, "")


def asked(*values: float, first: int = 0) -> Value:
    results = [Result(first + n, first + n, each) for n, each in enumerate(values)]
    return Value(mean_over_texts(values, range(len(values))), len(values), "", tuple(results))


def test_pairs_decide_where_the_questions_are_the_same() -> None:
    """Both find some questions hard; one is a little better at each."""
    claim = Claim("at", "says", "", {"a": ask("x"), "b": ask("x")}, rule="a > b")
    hard = [n / 20 for n in range(20)]
    better, worse = asked(*(each + 0.02 for each in hard)), asked(*hard)
    assert papers.judged(claim, {"a": better, "b": worse}) == (HOLDS, "a - b: +0.020 [+0.020, +0.020]")
    assert papers.judged(claim, {"a": worse, "b": better}) == (FAILS, "a - b: -0.020 [-0.020, -0.020]")
    kind, told = papers.judged(claim, {"a": better, "b": asked(*hard, first=100)})
    assert kind == CLOSE and told.endswith("(other questions, not paired)")
    kind, told = papers.judged(claim, {"a": better, "b": asked(*hard[:15])})
    assert kind == HOLDS and told.endswith("(15 questions of both)")


def test_where_no_answer_differs_only_a_strict_claim_is_open() -> None:
    same = {"a": asked(0.0, 1.0, 1.0, 0.0), "b": asked(0.0, 1.0, 1.0, 0.0)}
    assert papers.holds("a > b", same) == papers.holds("a < b", same) == CLOSE
    assert papers.holds("a >= b", same) == papers.holds("a <= b", same) == HOLDS


def test_a_number_of_a_rule_is_the_papers_or_said_to_be_ours() -> None:
    """A speed-up counts from 95% of it on, as docs/papers/README.md says."""
    for name, claim in ALL:
        for comparison in claim.comparisons():
            _, _, factor, right = papers.parsed(comparison)
            said = re.sub("%", " ", f" {claim.says} {claim.at} ")
            for number in {right, f"{100 * float(right):g}"} if re.fullmatch(r"[\d.]+", right) else ():
                if re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", said):
                    break
            else:
                assert claim.threshold or right in claim.ours or right in claim.beside, (name, claim.at, right)
            stated = any(re.search(rf"(?<!\d){re.escape(each)}(?!\d)", said) for each in factors(factor))
            assert factor == 0.95 or factor == 1 or stated or claim.threshold, (name, claim.at, factor)


def factors(factor: float) -> set[str]:
    """How a text may say 1.05 or 0.99: 5%, 99%."""
    return {f"{100 * factor:g}", f"{100 * (factor - 1):.0f}"}


def test_lines_of_a_claim_count_once_and_as_the_worst() -> None:
    page = PAGES["clusterkv"]
    assert len(page.kinds) < len(page.claims) and sum(page.counts.values()) == len(page.kinds)
    page = papers.Page.__new__(papers.Page)
    page.kinds = {"one": {HOLDS, FAILS}, "two": {HOLDS}, "three": {CLOSE, HOLDS}, "four": {FAILS}}
    assert page.counts == dict.fromkeys(papers.VERDICTS, 0) | {HOLDS: 1, FAILS: 2, CLOSE: 1}


def test_a_line_that_is_not_in_the_paper_counts_nowhere() -> None:
    for name, claim in ALL:
        assert claim.beyond == ("not in the paper" in f"{claim.says} {claim.why}"), (name, claim.at)
    for page in PAGES.values():
        assert set(page.kinds) == {claim.name for claim in page.claims if not claim.beyond}
    assert {name for name, claim in ALL if claim.beyond} == {"balancekv", "clusterkv"}


def test_lines_about_one_figure_and_one_statement_are_one_claim() -> None:
    for name, claim in (("keyformer", "Fig. 8 left"), ("clusterkv", "§V-C, throughput"), ("clusterkv", "§V-C, hits")):
        assert sum(each.claim == claim for each in PAGES[name].claims) == 2, claim
    assert sum(name.startswith("Fig. 7, ") for name in PAGES["keyformer"].kinds) == 2


def test_numbers_refute_no_theorem_whose_condition_they_do_not_meet() -> None:
    """Real keys are not clusterable as the theorems of SubGen ask, and delta r is no o(log n) of one length."""
    own = [claim for claim in PAGES["subgen"].claims if claim.ours and claim.at.startswith(("Theorem", "Eq. (3)"))]
    assert len(own) == 6
    assert all(claim.verdict == OTHER and "nothing is refuted" in claim.why for claim in own)


def test_a_statement_about_several_lengths_is_judged_at_each() -> None:
    (claim,) = (claim for claim in PAGES["clusterkv"].claims if claim.at == "Fig. 13b")
    judged = {name for comparison in claim.comparisons() for name in papers.parsed(comparison)[::3]}
    assert judged == set(claim.ours) and len(judged) == 4


def test_no_share_of_a_typed_time_stands_for_a_record() -> None:
    """`bench operations` divides by milliseconds that were given to it; pages divide by a step or a prefill."""
    for name, at, each in ASKS:
        assert each.formula not in ("share", "whole_ms") and "whole_ms" not in each.formula, (name, at)
        if each.kind == "recall_all":
            assert each.over is not None and each.over.kind == "decode_all", (name, at)


@pytest.mark.parametrize("rival", ["Quest", "InfiniGen"])
def test_recall_is_compared_at_every_budget_with_each_rival(rival: str) -> None:
    own = [claim for _, claim in ALL if claim.claim == f"Fig. 11a over {rival}"]
    assert [claim.rule for claim in own] == [f"paper's setting > {rival}"] * 12
    lengths = [{each.where["setting"] for each in claim.ours.values()} for claim in own]
    assert lengths == [{"tokens 32,000"}] * 8 + [{"tokens 8,192"}] * 4


def test_a_page_fills_when_the_record_appears(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results" / "eval").mkdir(parents=True)
    place = {"lines": 200, "model": "qwen2.5-coder-1.5b", "dtype": "bfloat16", "budget": "1/4", "question": "seen"}
    made = [
        record("lines", {**place, "method": method, "sample": f"question={n}", "score": float(n < right)})
        for method, right in (("keyformer:a=1:b=2", 40), ("h2o", 5))
        for n in range(50)
    ]
    records.append(tmp_path / "results" / "eval" / "lines.jsonl", *made)
    names = {"ours": "keyformer:b=2:a=1", "theirs": "h2o"}
    own = {name: papers.answers("lines", method, "1/4", "lines 200") for name, method in names.items()}
    claim = Claim("Fig. 1", "better", "any", own, rule="ours > theirs")
    line = papers.shown(docs.Numbers(tmp_path), claim)
    assert (
        line.says == "**Fig. 1**: better"
        and line.verdict.startswith(f"**{HOLDS}**: ours - theirs: +0.700 [+0.5")
        and line.commands == (made[0]["command"],)
    )
    assert re.fullmatch(r"ours 0\.80 \[0\.\d\d, 0\.\d\d\], theirs 0\.10 \[0\.\d\d, 0\.\d\d\]; 50 questions", line.ours)
    other = Claim(
        "Fig. 1",
        "better",
        "any",
        {**own, "more": papers.answers("lines", "quest", "1/4", "lines 200")},
        rule="more > ours",
    )
    unknown = papers.shown(docs.Numbers(tmp_path), other)
    assert unknown.kind == NOTHING and unknown.ours.startswith("ours 0.80") and "more not measured" in unknown.ours
