"""``python -m pard_jax.synthesize`` from end to end, in this process, with a tiny model on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pard_jax.config import ModelConfig
from pard_jax.synthesize.__main__ import main
from pard_jax.tokenizer import load_tokenizer
from tests.helpers.tokenizer import make_tokenizer
from tests.synthesize.talker import VOCABULARY, make_talker

SMALL = "--max-tokens 20 --user-max-tokens 25 --max-num-seqs 6 --dtype float32"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> str:
    return str(make_talker(tmp_path_factory.mktemp("talker"), tokenizer_dir))


@pytest.fixture
def run(talker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs the command in ``tmp_path``; gives status, stderr and what ``out.jsonl`` holds then."""

    def run(flags: str, *more: str, model: str = talker) -> tuple[int, str, list[dict[str, Any]]]:
        output = tmp_path / "out.jsonl"
        status = main(["--model", model, "--output", str(output), *SMALL.split(), *flags.split(), *more])
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = output.read_text().splitlines() if output.exists() else []
        return status, captured.err, [json.loads(line) for line in lines]

    return run


def test_the_model_writes_both_turns_and_the_file_is_gone_on_with(run, tmp_path):
    (tmp_path / "openers.txt").write_text("# begin with\nWho is \n\nTell\\nme\n")
    flags = f"--openers {tmp_path}/openers.txt --opener-share 0.5"
    status, err, records = run(f"--num-samples 4 {flags}")
    assert status == 0 and len(records) == 4
    assert "samples      4 in " in err and "4 of them new" in err and "tokens/s" in err
    status, err, more = run(f"--num-samples 30 {flags}")
    assert status == 0 and len(more) == 30 and more[:4] == records
    assert "going on     with 4 samples" in err and "26 of them new" in err
    dropped = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["progress"]["dropped"]
    assert f"dropped      {sum(dropped.values())} (" in err
    assert all(f"{count} {reason}" in err for reason, count in dropped.items())
    starts = [r["messages"][0]["content"] for r in more]
    assert any(text.startswith("Who is") for text in starts) and any(text.startswith("Tell\nme") for text in starts)
    assert not any(text.startswith("# begin") for text in starts)
    status, err, same = run(f"--num-samples 30 --seed 1 {flags}")
    assert status == 2 and "other settings (seed: 0 then, 1 now)" in err and same == more


def test_prompts_of_a_file(run, tmp_path, tokenizer):
    lines = [
        {"prompt": "What is it?"},
        {"messages": [{"role": "user", "content": "The dog"}]},
        {"prompt_token_ids": [40, 41]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, _, records = run(
        f"--prompts {tmp_path}/prompts.jsonl --repeats-per-prompt 20 --greedy-share 0 --keep-cut-off"
    )
    assert status == 0
    assert {r["id"] % 3 for r in records} == {0, 1, 2}
    for r in records:
        [[start, _]] = r["loss_ranges"]
        prompt = r["token_ids"][:start]
        if r["id"] % 3 == 2:
            assert prompt == [40, 41] and "messages" not in r
            continue
        assert prompt == tokenizer.apply_chat_template(r["messages"][:1])
        assert r["messages"][0]["content"] == ("What is it?", "The dog")[r["id"] % 3]
        assert [m["role"] for m in r["messages"]] == ["user", "assistant"]


def test_the_systems_turn_is_given(run, tmp_path, tokenizer):
    (tmp_path / "prompts.txt").write_text("What is it?\nWho?\nThe dog\nThe fox\n")
    for flags in (f"--prompts {tmp_path}/prompts.txt --greedy-share 0", "--num-samples 1"):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        (tmp_path / "out.jsonl.meta.json").unlink(missing_ok=True)
        _, _, records = run(flags + " --keep-cut-off", "--system", "Be brief.")
        assert records[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        text = tokenizer.decode(records[0]["token_ids"], skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "say with --num-samples"),
        ("--num-samples 0", "--num-samples must be at least 1, got 0"),
        ("--num-samples 3 --greedy-share 1.5", "--greedy-share must be a share from 0 to 1, got 1.5"),
        ("--num-samples 3 --opener-share -1", "--opener-share must be a share"),
        ("--num-samples 3 --seed -1", "--seed must not be negative"),
        ("--num-samples 3 --repeats-per-prompt 2", "needs --prompts"),
        ("--num-samples 3 --openers empty.txt", "holds no openers"),
        ("--num-samples 3 --openers missing.txt", "missing.txt: No such file"),
        ("--prompts prompts.txt --openers prompts.txt", "--prompts brings whole ones"),
        ("--prompts prompts.txt --repeats-per-prompt 2 --greedy-share 1", "the same greedy answers"),
        ("--num-samples 3 --dtype int8", "dtype='int8' is not supported"),
        ("--num-samples 3 --temperature 3", "temperature must be in [0, 2]"),
        ("--num-samples 3 --output missing/out.jsonl", "there is no directory"),
        ("--num-samples 3 --max-tokens LIMIT", "--max-tokens LIMIT leaves no room for a prompt: the model's limit is"),
        ("--prompts prompts.txt --max-tokens LIMIT", "--max-tokens LIMIT leaves no room"),
        ("--num-samples 3 --user-max-tokens LIMIT", "--user-max-tokens LIMIT leaves no room"),
        (
            "--num-samples 3 --max-model-len 20",
            "--max-tokens 20 leaves no room for a prompt: --max-model-len is 20 tok",
        ),
    ],
)
def test_errors(run, talker, tmp_path, monkeypatch, flags, message):
    limit = str(ModelConfig.from_pretrained(talker).max_position_embeddings)
    flags, message = flags.replace("LIMIT", limit), message.replace("LIMIT", limit)
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("# nothing\n\n")
    Path("prompts.txt").write_text("Why?\n")
    status, err, records = run(flags)
    assert status == 2 and err.splitlines()[-1].startswith("error: ") and message in err
    assert not records and not Path("out.jsonl").exists()


def test_answers_that_end_at_the_models_limit(run, talker, tmp_path):
    (tmp_path / "prompts.txt").write_text("What is it?\n")
    limit = ModelConfig.from_pretrained(talker).max_position_embeddings
    flags = f"--prompts {tmp_path}/prompts.txt --keep-cut-off --max-tokens"
    status, err, _ = run(f"{flags} {limit - 1}")
    assert status == 0 and f"note         answers end where prompt and answer are {limit} tokens, the model's" in err
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.meta.json").unlink()
    status, err, _ = run(f"{flags} 20")
    assert status == 0 and "note " not in err


def test_models_that_cannot_open_a_turn(run, talker, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(Path(talker) / name)
    status, err, _ = run("--num-samples 3", model=str(model))
    assert status == 2 and "holds no tokenizer" in err
    make_tokenizer(model, chat_template=False)
    status, err, _ = run("--num-samples 3", model=str(model))
    assert status == 2 and "no chat template" in err
    # Given prompts need neither.
    (tmp_path / "prompts.txt").write_text("The dog\n")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    status, _, records = run(f"--prompts {tmp_path}/prompts.txt --keep-cut-off", model=str(model))
    assert status == 0 and len(records) == 1
    assert records[0]["token_ids"][: records[0]["loss_ranges"][0][0]] == tokenizer.encode("The dog")
    assert max(records[0]["token_ids"]) < VOCABULARY


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "Magpie" in capsys.readouterr().out
    assert "pard_jax.synthesize" in sys.modules
