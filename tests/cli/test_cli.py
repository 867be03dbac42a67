"""The command line: what it prints, what a script can read, and how it fails."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer.testing import CliRunner

import kvsketch
from kvsketch import environment, models
from kvsketch.cache.replay import fitting
from kvsketch.cli import app, main
from kvsketch.cli.boundary import one_line
from kvsketch.cli.generate import DocumentAndPrompt, read_request
from kvsketch.cli.methods import TABLE, describe
from kvsketch.cli.options import COMPARED_MODEL, DEFAULT_MODEL
from kvsketch.cli.progress import quick_dtype
from kvsketch.cli.serve import greeting
from kvsketch.compare import doubt
from kvsketch.compiler import Programs, programs
from kvsketch.doubt_threshold import Told, chosen
from kvsketch.methods import Rehearse
from kvsketch.serve.summary import full_cache_bytes
from tests.helpers import zoo
from tests.helpers.tiny import save_tiny_model

PROMPT = "The cat sat on the mat, and the dog sat on the cat. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def run(*args: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=text)


def read_json(*args: str, text: str | None = None) -> Any:
    result = run(*args, "--json", text=text)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", ["--help", "env", "models", "methods", "methods snapkv"])
def test_commands_that_only_tell_import_neither_torch_nor_transformers(command: str) -> None:
    check = (
        "import sys; from kvsketch.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check, *command.split()], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) > 5 and done.stdout.splitlines()[-1] == "[]"


QUICK = {
    "recommend": ["recommend", "--model", "qwen2.5-coder-1.5b", "--context", "32000", "--memory", "200MB"],
    "GPU": ["recommend", "--model", "gemma3-270m", "--context", "32000", "--gpu", "h100", "--document", "9000"],
    "folder": ["recommend", "--model", "{folder}", "--context", "32000", "--gpu", "80GB"],
    "busy port": ["serve", "--port", "{port}"],
    "no such GPU": ["recommend", "--model", "smollm2-135m", "--context", "100", "--gpu", "h999"],
    "no such model": ["recommend", "--model", "nothing", "--context", "100", "--gpu", "h100"],
}


def test_a_server_names_its_method_as_it_was_given() -> None:
    """A share of bytes is read as a budget of tokens, which nobody has typed."""
    engine = SimpleNamespace(state=lambda: SimpleNamespace(rows=4, queue=32))
    service = SimpleNamespace(name="tiny", method="rehearse:budget=37.4%", context=8192, engine=engine)
    server = SimpleNamespace(service=service, address="http://127.0.0.1:8000")
    line = greeting(server, True, "rehearse:bytes=1/8")[0]
    assert line.startswith("tiny, rehearse:bytes=1/8 (for this model rehearse:budget=37.4%): up to 8,192 tokens")
    assert greeting(server, True, service.method)[0].startswith("tiny, rehearse:budget=37.4%: up to")


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_answer_without_torch(command: str, tmp_path: Path) -> None:
    """Importing torch and transformers takes seconds."""
    save_tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        words = [word.format(port=busy.getsockname()[1], folder=tmp_path) for word in QUICK[command]]
        code = (
            f"import sys; sys.argv[1:] = {words}; from kvsketch.cli import app\n"
            "try: app()\n"
            "except SystemExit: print([m for m in ('torch', 'transformers') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert ("cannot listen on 127.0.0.1" in done.stderr) == (command == "busy port")
    assert ("users that fit" in done.stdout) == (command in ("GPU", "folder"))


def test_the_table_of_methods_is_what_their_classes_say() -> None:
    from kvsketch_lab.commands import table_text

    described = [describe(cls) for cls in kvsketch.METHODS.values()]
    assert TABLE.read_text() == table_text(described), "run kvsketch report --docs"


def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in ("demo", "methods", "generate", "models", "env"))


def test_dir_shows_the_public_names() -> None:
    assert dir(kvsketch) == sorted(kvsketch.__all__) and all(hasattr(kvsketch, name) for name in dir(kvsketch))


def test_the_version_is_told() -> None:
    assert run("--version").stdout == f"kvsketch {kvsketch.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "kvsketch", "--version"], capture_output=True, text=True)
    assert module.stdout == f"kvsketch {kvsketch.__version__}\n"


def test_default_model_is_the_catalogue_default() -> None:
    assert DEFAULT_MODEL == models.DEFAULT_MODEL
    assert COMPARED_MODEL in models.CATALOG


def test_methods_lists_every_method() -> None:
    listed = {method["name"]: method for method in read_json("methods")}
    assert list(listed) == list(kvsketch.METHODS)
    assert listed["streamingllm"]["parameters"]["sinks"] == 4
    assert all(method["idea"] and method["family"] for method in listed.values())
    table = run("methods").stdout
    assert all(name in table for name in kvsketch.METHODS)
    assert run("methods", "snapkv:budget=12").stdout == run("methods", "snapkv").stdout


@pytest.mark.parametrize("name", kvsketch.METHODS)
def test_every_listed_parameter_can_be_written(name: str) -> None:
    described = read_json("methods", name)
    settings = [f"{key}={value}" for key, value in described["parameters"].items()]
    assert kvsketch.parse_method(":".join([name, *settings])) == kvsketch.METHODS[name]()
    assert described["idea"] in run("methods", name).stdout.replace("\n", " ")
    assert all(option["meaning"] for option in described["options"])
    shown = " ".join(run("methods", name).stdout.split())
    assert all(option["meaning"] in shown for option in described["options"])


def test_models_lists_the_catalogue() -> None:
    listed = read_json("models")
    assert [model["name"] for model in listed] == list(models.CATALOG)
    assert all(len(model["sha256"]) == 64 and model["licence"] for model in listed)
    assert "smollm2-135m" in run("models").stdout


def test_env_reports_versions_and_ranges() -> None:
    result = read_json("env")
    assert result["kvsketch"] == kvsketch.__version__
    assert set(result["versions"]) == set(result["tested"]) == {"python", "torch", "transformers", "triton"}
    assert result["home"] == str(models.home())
    assert result["versions"]["transformers"] in run("env").stdout


def test_triton_is_not_needed_and_importing_warns_of_nothing(tmp_path: Path) -> None:
    """A model generates in an interpreter that cannot import it; versions that were not tested are named by caches."""
    save_tiny_model(tmp_path)
    code = f"""
import sys
sys.modules["triton"] = None
import warnings
import torch
from kvsketch import environment
tested = environment.TESTED.pop("torch")
environment.TESTED["torch"] = ("1.0", "1.1")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from kvsketch import *
    import kvsketch
print([each.message for each in told if "tested range" in str(each.message)])
environment.TESTED["torch"] = tested
model, _ = models.load({str(tmp_path)!r}, device="cpu")
for method in ("rehearse:budget=36", "h2o:budget=36", "quest:budget=36"):
    cache = kvsketch.CompressedCache(model, method)
    model.generate(torch.arange(1, 41)[None], past_key_values=cache, max_new_tokens=3, do_sample=False)
    print(cache.tokens_seen)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[]", *["42"] * 3], result.stderr


@pytest.mark.parametrize(
    ("version", "warned"),
    [("5.14.9", True), ("5.15.0", False), ("5.23.9", False), ("5.24.0", True), ("6.0.0", True), (None, False)],
)
def test_versions_outside_the_tested_range_are_named(version: str | None, warned: bool) -> None:
    warning = environment.untested("transformers", version)
    assert (warning is not None) is warned
    if warned:
        assert warning is not None and str(version) in warning and "5.15.0" in warning


def test_a_warning_of_ours_is_one_line_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a path and a line of source; another package's are as they are."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["kvsketch", "--version"])
    with pytest.raises(SystemExit):
        main()
    ours = warnings.formatwarning("kvsketch: an old\nrelease", UserWarning, environment.__file__, 3, "cache = 1")
    assert ours == "warning: an old release\n"
    assert "/other.py:3: UserWarning: old" in warnings.formatwarning("old", UserWarning, "/other.py", 3, "cache = 1")


def test_what_is_required_is_what_was_tested() -> None:
    """The oldest release that pip may install is the oldest on which the tests passed; below the next major one."""
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in map(Requirement, wanted):
        if requirement.name in environment.TESTED:
            oldest, newest = map(Version, environment.TESTED[requirement.name])
            bounds = {each.operator: Version(each.version) for each in requirement.specifier}
            assert (*bounds[">="].release, 0)[:3] == oldest.release
            assert bounds["<"].release == (newest.major + 1,)


def test_env_says_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch and the dispatch of operations see it."""
    assert environment.gpu_names() == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(environment, "gpu_names", lambda: ["a GPU"])
    assert (result := environment.describe()).cpu_threads == 3 and result.gpus == ["a GPU"]
    assert result.kernels == ("Triton" if result.versions["triton"] else "torch reference: Triton cannot be imported")
    monkeypatch.setattr(environment, "gpu_names", list)
    monkeypatch.setattr(environment, "programs", lambda: Programs(ctypes.CDLL(None), "/opt/bin/cc"))
    assert environment.describe().kernels == "C, compiled by /opt/bin/cc"
    monkeypatch.setattr(environment, "programs", programs.__wrapped__)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert environment.describe().kernels == "torch reference: no GPU, and no C compiler (cc, gcc, clang)"
    monkeypatch.setenv("KVSKETCH_KERNELS", "reference")
    assert environment.describe().kernels == "torch reference: KVSKETCH_KERNELS=reference"
    monkeypatch.setenv("KVSKETCH_KERNELS", "fast")
    assert "KVSKETCH_KERNELS='fast' is not one of auto, reference" in run("env").stderr


def test_env_warns_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.TESTED, "transformers", ("1.0", "1.1"))
    assert "outside the tested range 1.0 to 1.1" in run("env").stderr


def test_the_first_cache_warns_of_untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, at the line that made it."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    monkeypatch.setitem(environment.TESTED, "transformers", ("1.0", "1.1"))
    environment.warn_of_untested.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"transformers .* is outside the tested range 1.0 to 1.1") as told:
            [kvsketch.CompressedCache(config, "full") for _ in range(3)]
        assert [Path(each.filename) for each in told] == [Path(__file__)]
    finally:
        environment.warn_of_untested.cache_clear()


def test_generate_gives_the_models_own_text_with_the_full_cache(folder: str) -> None:
    same = ("--dtype", "float32")  # a CPU that multiplies bfloat16 natively takes that by itself
    result = read_json("generate", PROMPT, "--model", folder, "--method", "full", "--max-new-tokens", "9", *same)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = DynamicCache(config=model.config)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=9, do_sample=False)
    count = inputs["input_ids"].shape[1]
    assert result["text"] == tokenizer.decode(output[0, count:], skip_special_tokens=True)
    assert result["prompt_tokens"] == count
    assert result["full_bytes"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert result["tokens_seen"] == result["tokens_stored"] == cache.get_seq_length()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [5, 40])
def test_the_full_cache_is_measured_with_its_sliding_layers(family: str, length: int) -> None:
    model = zoo.build(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(zoo.tokens(1, length), past_key_values=cache, use_cache=True)
    assert full_cache_bytes(model, length) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_generate_streams_text_and_says_what_the_cache_took(folder: str) -> None:
    command = ("generate", PROMPT, "--model", folder, "--method", "streamingllm:budget=16", "--max-new-tokens", "6")
    command += ("--dtype", "float32")
    streamed, result = run(*command), read_json(*command)
    assert streamed.stdout.strip() == result["text"].strip()
    assert result["tokens_stored"] == 16
    assert 0 < result["device_bytes"] < result["full_bytes"]
    kept, speed = streamed.stderr.strip().splitlines()
    assert kept.startswith(
        f"streamingllm:budget=16: {result['tokens_seen']} tokens read, 16 kept, and what was dropped"
    )
    assert f"read {result['prompt_tokens']} tokens at " in speed and "wrote 6 at " in speed
    assert "float32 on cpu; peak memory " in speed and "above the loaded model" in speed
    assert result["peak_bytes"] > result["peak_bytes_above_model"] >= 0
    assert result["prefill_tokens_per_second"] > 0 and result["decode_tokens_per_second"] > 0


def test_the_default_keeps_every_token(folder: str) -> None:
    result = read_json("generate", PROMPT, "--model", folder, "--max-new-tokens", "2")
    assert result["method"] == "full" and result["tokens_stored"] == result["tokens_seen"]


def test_a_question_about_a_file_a_pipe_and_a_saved_cache_is_one_prompt(folder: str, tmp_path: Path) -> None:
    file, saved = tmp_path / "report.md", tmp_path / "report.kvs"
    file.write_text(PROMPT, encoding="utf-8")
    question, options = "Who sat on the mat?", ("--model", folder, "--max-new-tokens", "5")
    named = read_json("generate", "--file", str(file), question, *options)
    assert named["prompt_tokens"] == len(f"{PROMPT}\n\n{question}\n")
    stream = ("--prefill", "stream", "--chunk", "40")
    others = [
        read_json("generate", question, *options, text=PROMPT),
        read_json("generate", "--file", "-", question, *options, text=PROMPT),
        read_json("generate", "--file", str(file), question, *options, *stream),
        read_json("generate", "--file", str(file), "--save", str(saved), question, *options),
    ]
    alone = read_json("generate", "--file", str(file), "--save", str(saved), *options)
    assert alone["text"] == "" and alone["new_tokens"] == 0 and alone["prompt_tokens"] == len(f"{PROMPT}\n\n")
    loaded = read_json("generate", "--load", str(saved), question, *options)
    assert loaded["prompt_tokens"] == len(f"{question}\n") and loaded["tokens_seen"] == named["tokens_seen"]
    assert {each["text"] for each in (*others, loaded)} == {named["text"]}


def test_several_files_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.txt", "two.txt")]
    for path in paths:
        path.write_text(f"text of {path.stem}\n", encoding="utf-8-sig")
    request = read_request("Why?", paths)
    one, two = (f"File {path}:\n\ntext of {path.stem}\n" for path in paths)
    assert request == DocumentAndPrompt(f"{one}\n\n{two}", "Why?")


def test_bfloat16_is_for_a_cpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"bf16": has}, raising=False)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
        assert quick_dtype("cpu") == ("bfloat16" if has and sys.platform != "darwin" else None)
        assert quick_dtype("cuda") is None


def test_generate_reads_a_file_a_pipe_and_an_argument_alike(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = ("--model", folder, "--max-new-tokens", "5")
    answers = [
        read_json("generate", PROMPT, *options)["text"],
        read_json("generate", "--file", str(file), *options)["text"],
        read_json("generate", "-", *options, text=PROMPT)["text"],
        read_json("generate", *options, text=PROMPT)["text"],
    ]
    assert len(set(answers)) == 1


def test_generate_finds_the_budget_of_a_memory(folder: str) -> None:
    options = ["generate", PROMPT, "--model", folder, "--max-new-tokens", "4", "--memory", "40kB"]
    done = run(*options, "--method", "h2o:recent=8")
    said = next(line for line in done.stderr.splitlines() if line.startswith("--memory 40kB"))
    assert "tokens: h2o:budget=" in said, done.output
    assert read_json(*options, "--method", "h2o:recent=8")["device_bytes"] <= 40_000
    wrong = run(*options)
    assert wrong.exit_code == 2 and "memory=40.00 kB is too little" in wrong.stderr and "use bits=" in wrong.stderr


def test_generate_samples_by_seed(folder: str) -> None:
    def sample(seed: int) -> str:
        options = ("--model", folder, "--temperature", "1.5", "--seed", str(seed), "--max-new-tokens", "12")
        return str(read_json("generate", PROMPT, *options)["text"])

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_fit_writes_the_maps_of_a_model_once(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ".join(f"{number} cats sat." for number in range(200)))
    texts = str(tmp_path / "texts")
    options = ["fit", folder, "--text", texts, "--tokens", "300", "--length", "256", "--device", "cpu"]
    options += ["--doubt-questions", "0"]
    first, second = run(*options), run(*options)
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert "fitted to 256 tokens" in first.stdout and "--again fits them again" in second.stdout
    model, _ = models.load(folder, device="cpu")
    assert isinstance(method := kvsketch.CompressedCache(model, "rehearse:replay=learned").method, Rehearse)
    assert method.learned is not None and len(method.learned.queries) == model.config.num_hidden_layers
    assert not list((tmp_path / "home" / "maps").glob("*.part"))
    none = run(*options, "--bases-only", "--again")
    assert none.exit_code == 2 and "heads whose size is a multiple of 16" in one_line(none.output)
    text = str(tmp_path / "texts" / "a.txt")
    short = run(*options[:3], text, "--tokens", "256", "--length", "512", "--again", "--doubt-questions", "0")
    assert short.exit_code == 0, short.output
    (tmp_path / "b.txt").write_text("too short")
    refused = run("fit", folder, "--text", str(tmp_path / "b.txt"), "--again")
    assert refused.exit_code == 2 and "none with 256 tokens or more" in one_line(refused.output)


def test_fit_adds_a_threshold_of_doubt_to_what_a_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has nothing right; answers in its place choose the threshold."""
    folder, out = str(save_tiny_model(tmp_path / "model", heads=2)), tmp_path / "fitted.safetensors"
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    (tmp_path / "a.txt").write_text(" ".join(f"{number} cats sat." for number in range(200)))
    text = ["fit", folder, "--text", str(tmp_path / "a.txt"), "--tokens", "256", "--length", "256", "--out", str(out)]
    assert run(*text, "--bases-only").exit_code == 0
    told = [Told(n / 20, right=False, full_right=True) for n in range(1, 20)]
    asked: dict[str, Any] = {}
    monkeypatch.setattr(doubt, "ask", lambda *args, **options: asked.update(options) or told)
    added = run(*text)
    assert (asked["first"], asked["fewest_lost"]) == (12, 9), "a tenth of 120 pieces, and what a threshold needs"
    assert "threshold of doubt, 0.100, to" in one_line(added.stdout) and "19 were lost, 18 of these" in added.stdout
    identity = kvsketch.CompressedCache(models.load(folder, device="cpu")[0]).identity
    found = fitting.read(out, identity)
    assert found.bases is not None and found.doubt == chosen(told, 0.9, doubt.METHODS)
    assert "--again fits them again" in run(*text).stdout
    assert run(*text, "--bases-only", "--again").exit_code == 0
    assert fitting.read(out, identity).doubt == found.doubt, "directions alone are fitted again"
    monkeypatch.setattr(doubt, "ask", lambda *args, **options: told[:3])
    none = run(*text, "--doubt-only", "--again")
    assert none.exit_code == 0 and "no threshold of doubt: 3 of 3 answers were lost" in one_line(none.output)
    assert fitting.read(out, identity).doubt == found.doubt
    for words, options in (
        ("--bases-only and --doubt-only exclude each other", ["--bases-only", "--doubt-only"]),
        ("learns nothing; ask questions", ["--doubt-only", "--doubt-questions", "0"]),
        ("catch 1 must be a share", ["--catch", "1"]),
    ):
        refused = run(*text, *options)
        assert refused.exit_code == 2 and words in one_line(refused.output)


def test_fit_learns_directions_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = save_tiny_model(tmp_path / "model", heads=2), tmp_path / "bases.safetensors"
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    (tmp_path / "a.txt").write_text(" ".join(f"{number} cats sat." for number in range(200)))
    options = [
        "fit",
        str(folder),
        "--text",
        str(tmp_path / "a.txt"),
        "--tokens",
        "256",
        "--length",
        "256",
        "--bases-only",
    ]
    alone, named = run(*options), run(*options, "--out", str(out))
    assert "use basis=learned" in one_line(alone.stdout) and "basis=learned looks for it at" in one_line(named.stdout)
    model, _ = models.load(str(folder), device="cpu")
    bases = kvsketch.CompressedCache(model, "full:bits=2:basis=learned").method.bases
    layers = range(model.config.num_hidden_layers)
    assert bases is not None and [*bases.keys] == [*bases.values] == [*layers]
    parts = ("directions", "deviation", "shares")
    wanted = {f"{kind}.{layer}.{part}" for kind in ("keys", "values") for layer in layers for part in parts}
    assert set(safetensors.torch.load_file(out)) == wanted


def test_a_prompt_beyond_the_positions_is_refused(folder: str) -> None:
    method = "streamingllm:budget=99"
    command = ("generate", "a" * 4097, "--model", folder, "--max-new-tokens", "2", "--prefill", "stream", "--method")
    result = run(*command, method)
    assert result.exit_code == 2 and "the prompt has 4,097 tokens" in result.stderr and "4,096" in result.stderr
    assert run(*command, f"{method}:positions=cache").exit_code == 0


FOLDER = "FOLDER"
MISTAKES = {
    "method": (["generate", "hi", "--model", FOLDER, "--method", "streamllm"], "streamingllm"),
    "parameter": (["generate", "hi", "--model", FOLDER, "--method", "streamingllm:sink=3"], "sinks"),
    "budget": (["generate", "hi", "--model", FOLDER, "--method", "streamingllm:budget=lots"], "25%"),
    "small budget": (["generate", "hi", "--model", FOLDER, "--method", "streamingllm:budget=2"], "budget=5"),
    "file": (["generate", "--file", "no/such/file.txt", "--model", FOLDER], "no/such/file.txt"),
    "folder as file": (["generate", "--file", FOLDER, "--model", FOLDER], "directory"),
    "model": (["generate", "hi", "--model", "smollm3"], "smollm2-135m"),
    "model folder": (["generate", "hi", "--model", "./no/such/folder"], "smollm2-135m"),
    "gguf file": (["generate", "hi", "--model", "no-such-file.gguf"], "no-such-file.gguf"),
    "device": (["generate", "hi", "--model", FOLDER, "--device", "abacus"], "cuda"),
    "dtype": (["generate", "hi", "--model", FOLDER, "--dtype", "int3"], "bfloat16"),
    "no saved cache": (["generate", "--load", "no/such.kvs", "hi", "--model", FOLDER], "--save no/such.kvs"),
    "load and method": (["generate", "--load", "x.kvs", "hi", "--method", "full"], "leave out --method"),
    "nothing to save": (["generate", "hi", "--save", "x.kvs"], "--file"),
    "chunk alone": (["generate", "hi", "--chunk", "64"], "--prefill stream"),
    "prefill": (["generate", "hi", "--prefill", "fast"], "exact, stream"),
    "empty prompt": (["generate", " ", "--model", FOLDER], "--file"),
    "method to show": (["methods", "h3o"], "uniform"),
    "model to pull": (["models", "pull", "gpt-9"], "qwen2.5-coder-0.5b"),
    "demo method": (["demo", "--methods", "full,best", "--model", FOLDER], "streamingllm"),
    "demo budget": (["demo", "--budgets", "1/0", "--model", FOLDER], "1/8"),
    "demo positions": (["demo", "--tokens", "5000", "--model", FOLDER], "trained on 4,096"),
    "place to save": (["generate", "--file", __file__, "--save", "no/such/x.kvs"], "no folder no/such for --save"),
    "folder to read to": (["read", __file__, "--out", "."], "--out . is a folder"),
    "document": (["chat", "no-such-file.txt"], "no file no-such-file.txt"),
    "command": (["fly"], "'fly'; choose one of: demo,"),
    "option": (["env", "--jso"], "--jso"),
    "option of all": (["--nope"], "--nope"),
    "number": (["demo", "--tokens=many"], "'many'; see `root demo --help`"),
    "argument": (["env", "extra"], "extra"),
    "range": (["demo", "--tokens", "2"], "not '2'; see"),
    "records": (
        ["recommend", "--model", "x", "--context", "1", "--memory", "1B", "--records", "no"],
        "no folder",
    ),
    "no demo budget": (["demo", "--budgets", ",", "--model", FOLDER], "1/4,1/8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_two(mistake: str, folder: str) -> None:
    args, hint = MISTAKES[mistake]
    result = run(*(folder if arg == FOLDER else arg for arg in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert hint in lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x89PNG\xff", "is a picture"), (b"a\0b", "is not text in UTF-8"), (b" \n", "is empty")],
)
def test_a_file_that_is_no_text_is_named(content: bytes, message: str, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(content)
    result = run("generate", "--file", str(file), "What is it?", "--model", folder)
    assert result.exit_code == 2
    assert f"picture.png {message}" in result.stderr


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load", interrupted)
    result = run("generate", "hi")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_the_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_TRACEBACK", "1")
    assert isinstance(run("methods", "h3o").exception, ValueError)


def test_one_line_joins_lines_and_names_the_file() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(FileNotFoundError(2, "No such file or directory", "a.txt")) == "a.txt: No such file or directory"
    assert one_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(("options", "unbuffered"), [(["--json"], ""), ([], "1")])
def test_a_reader_that_leaves_early_sees_no_traceback(options: list[str], unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from kvsketch.cli import main; main()", "methods", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() in (0, 1)


def test_eval_names_its_experiments() -> None:
    wrong = CliRunner().invoke(app, ["eval", "speed"])
    assert wrong.exit_code == 2
    assert "attention-error" in wrong.output
    listed = CliRunner().invoke(app, ["eval", "attention-error", "--help"])
    assert listed.exit_code == 0
    assert "--tokens" in listed.output


@pytest.mark.parametrize("name", ["eval", "bench", "report"])
def test_without_the_laboratory_its_commands_say_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if not k.startswith("kvsketch_lab")})
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not (Path(each) / "kvsketch_lab").is_dir()])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in type(f).__name__.lower()])
    told = CliRunner().invoke(app, [name, "--help"])
    assert told.exit_code == 2 and told.output.count("\n") == 1
    assert f"kvsketch {name} needs kvsketch-lab: pip install 'kvsketch[lab]'" in told.output
    assert f" {name} " in CliRunner().invoke(app, ["--help"]).output


def test_every_listed_benchmark_and_experiment_exists() -> None:
    from importlib.util import find_spec

    from kvsketch_lab.commands import BENCHMARKS, EXPERIMENTS

    assert all(find_spec(f"kvsketch_lab.benchmark.{name.replace('-', '_')}") for name in BENCHMARKS)
    assert all(find_spec(f"kvsketch_lab.evaluation.{name.replace('-', '_')}") for name in EXPERIMENTS)
