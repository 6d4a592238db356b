"""Each script as a user runs it: in a process of its own, without network."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common import run
from conftest import ROOT, load_script

SCRIPTS = ("01_pilot_gradient_angle", "02_acl_embed", "03_acl_grad", "04_multi_exit_2st", "05_acl_cl")
FIGURES = {"01": {"angles.png"}, "02": set(), "03": {"angles.png"}, "04": {"layers.png", "early_exit-2st-mha.png"},
           "05": {"layers.png", "early_exit-acl-cl.png"}}


def run_script(name, *flags, **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", **environment}
    return subprocess.run([sys.executable, str(ROOT / f"{name}.py"), *flags], env=environment, capture_output=True,
                          encoding="utf-8", timeout=170)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bare(name, tmp_path):
    """First line, a line per epoch, a table, records that parse, a figure; nothing on stderr."""
    result = run_script(name, "--epochs", "1", "--limit", "64", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("task toy: 64 train, 800 dev, 2 classes") and "torch" in lines[0]
    assert any("epoch 1/1: loss" in line for line in lines)
    table = [line for line in lines if line.startswith("| ")]
    assert "score" in table[0] and len({len(line) for line in table[:4]}) == 1
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    assert len(records) == {"01": 2, "02": 3, "03": 2, "04": 1, "05": 2}[name[:2]]
    for record in records:
        assert record["settings"]["epochs"] == len(record["epochs"]) == 1
        assert record["epochs"][0]["seconds"] > 0
        if name[:2] in ("04", "05"):
            assert len(record["epochs"][0]["exits"]) == 6 and len(record["stage_one"]) == 1
        else:
            assert len(record["epochs"][0]["angles"]["all"]) == 2
    assert not list(tmp_path.rglob("*.tmp"))
    assert {path.name for path in tmp_path.rglob("*.png")} == FIGURES[name[:2]]
    if name[:2] in ("04", "05"):                    # the early-exit table has a row per policy and threshold
        assert sum(line.startswith(("| entropy", "| patience", "| confidence")) for line in table) == 14


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as error:
        run(load_script(name).main)
    said = capsys.readouterr().out
    assert error.value.code == 0 and "--seeds" in said and "python " + name in said


@pytest.mark.parametrize("script, flags, parts", [(script, *case) for script, cases in {"03_acl_grad": [
    (["--tau", "0"], ["--tau", "'0'", "> 0"]), (["--lam", "1.5"], ["--lam", "'1.5'", "≤ 1"]),
    (["--epochs", "0"], ["--epochs", "≥ 1"]), (["--seeds", "1", "1"], ["--seeds", "distinct"]),
    (["--angl", "80"], ["unrecognized", "--angl"]), (["--angle", "181"], ["--angle", "≤ 180"]),
    (["--lr", "nan"], ["--lr", "'nan'"]),
    (["--max_length", "129"], ["--max_length", "129", "≤ 128"]), (["--device", "quantum"], ["--device", "quantum"]),
    (["--task", "rte", "--model", "tiny"], ["--model", "toy"]),
    (["--task", "rte", "--data_dir", "absent"], ["absent", "RTE"])], "04_multi_exit_2st": [
    (["--num_layers", "7"], ["--num_layers", "7", "1 … 6"]), (["--exit_lr", "0"], ["--exit_lr", "> 0"]),
    (["--exit_seeds", "0"], ["--exit_seeds", "≥ 1"]), (["--cache_gb", "-1"], ["--cache_gb", "≥ 0"]),
    (["--strategy", "3st"], ["--strategy", "3st", "alt"]), (["--exit", "conv"], ["--exit", "conv", "linear"]),
    (["--alternate", "batch"], ["--alternate", "batch", "step"])], "05_acl_cl": [
    (["--tsne", "7"], ["--tsne", "7", "1 … 6"]), (["--tsne", "0"], ["--tsne", "≥ 1"]),
    (["--lams", "0.1", "1.5"], ["--lams", "1.5", "≤ 1"]), (["--lams", "0.1", "0.10"], ["--lams", "distinct"]),
    (["--exit_lr", "1e-3", "0.001"], ["--exit_lr", "distinct"]), (["--load", "x", "--save", "y"], ["--load", "--save"]),
    (["--load", "absent"], ["absent", "not a model that --save wrote"]),
    (["--save", str(ROOT)], [str(ROOT), "expected an empty folder"])]}.items() for case in cases])
def test_bad_flag(monkeypatch, capsys, script, flags, parts):
    """One sentence naming the flag, what was found and what was expected; exit code 2."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    with pytest.raises(SystemExit) as error:
        run(load_script(script).main)
    message = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and all(part in message for part in parts), message


def test_no_network():
    """A hub that doesn't answer: asked once, one clear message with the ways on, exit code 2, no stack trace."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        def refuse():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                asked.append(time.time())
                connection.close()
        threading.Thread(target=refuse, daemon=True).start()
        result = run_script("03_acl_grad", "--task", "rte", HF_HUB_OFFLINE="0", NO_PROXY="*",
                            HF_ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}")
    assert result.returncode == 2 and len(asked) == 1
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    for part in ("--task rte", "127.0.0.1", "--data_dir", "HF_HUB_OFFLINE=1", "--task toy"):
        assert part in result.stderr


def test_offline_with_an_empty_cache(tmp_path):
    result = run_script("03_acl_grad", "--task", "rte", HF_HOME=str(tmp_path))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "--data_dir" in result.stderr.splitlines()[-1]


def test_readme_own_data(tmp_path):
    """README's lines for one's own data run as they stand, and print a line per text in the form shown there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```bash\n(.*?)```", readme, re.S) if "mkdir -p my_data" in block]
    for file in ROOT.glob("*.py"):
        (tmp_path / file.name).symlink_to(file)
    result = subprocess.run(["bash", "-e", "-c", code], cwd=tmp_path, capture_output=True, encoding="utf-8",
                            timeout=170, env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert result.returncode == 0, result.stderr
    assert "labels in train: 0 bad (1), 1 good (2)" in result.stdout and "macro_f1" in result.stdout
    [shown] = re.findall(r"```text\n(good\t.*?)```", readme, re.S)
    for text in (shown, "\n".join(result.stdout.splitlines()[-2:])):
        assert all(re.fullmatch(r"(good|bad)\t[01]\.\d{4}\t[1-6]", line) for line in text.strip().split("\n"))
    assert len(shown.splitlines()) == 2 and result.stderr == ""
