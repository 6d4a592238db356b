"""Stopping and going on: nothing lost, nothing half-written, nothing mixed."""

import contextlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

import common
from common import (InputError, checkpoint_paths, layer_table, load_backbone, prepare, resume, run, run_folder,
                    save_checkpoint, save_model, score_table, write_record)
from conftest import ROOT
from test_exits import multi_exit
from test_training import CL, EMBED, EXIT, GRAD, OWN, PILOT, train_whole, without_seconds


def same(one, other):
    """Bit for bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "seconds")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("script, method, name", [
    (PILOT, "ce+scl", "ce+scl-seed0"), (EMBED, "acl_embed", "acl_embed-seed0"), (GRAD, "acl", "acl-seed0"),
    (EXIT, "alt-mha", "alt-mha-seed0"), (EXIT, "2st-linear", "2st-linear-seed0.0"), (CL, "acl-cl", "acl-cl-seed0.0"),
    (CL, "acl-cl", "acl-lam0.02-seed0")])
def test_two_epochs_stop_and_two_more_are_four(monkeypatch, capsys, settings, roberta_dir, script, method, name):
    """To the bit, with dropout in backbone and exits: records, weights, moments, schedule, generators."""
    flags = ("--limit", "70", "--batch_size", "40", "--epochs", "4", "--model", str(roberta_dir), "--max_length", "40")
    own = {**OWN, "exit_epochs": 4, "angle_every": 3}
    args = settings(*flags, **own)
    data = prepare(args)
    data = data._replace(dev=data.train)
    straight = train_whole(script, method, 0, data, args)
    last = torch.load(checkpoint_paths(args, name)[0], weights_only=True)

    def stop_after_two(args, of, stateful, records):
        save_checkpoint(args, of, stateful, records)
        if of == name and len(records) == 2:
            raise KeyboardInterrupt
    monkeypatch.setattr(script, "save_checkpoint", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        train_whole(script, method, 0, data, args)
    monkeypatch.setattr(script, "save_checkpoint", save_checkpoint)
    args.fresh = False
    torch.manual_seed(99)                                   # whatever happened in between
    capsys.readouterr()
    resumed = train_whole(script, method, 0, data, args)
    assert f"{name}: goes on after epoch 2" in capsys.readouterr().out
    assert same(resumed, straight)
    assert same(torch.load(checkpoint_paths(args, name)[0], weights_only=True), last)


def test_a_damaged_checkpoint_is_left_out(capsys, settings):
    """The one before is taken, with a notice; if both are damaged the run starts over. Nothing in them is executed."""
    args = settings("--limit", "40", "--epochs", "3", **OWN)
    data = prepare(args)
    straight = GRAD.train("acl", 0, data, args)
    args.fresh = False
    newest, previous = checkpoint_paths(args, "acl-seed0")
    newest.write_bytes(newest.read_bytes()[:-1000])
    capsys.readouterr()
    assert without_seconds(GRAD.train("acl", 0, data, args)) == without_seconds(straight)
    said = capsys.readouterr().out
    assert f"note: {newest} can't be read" in said and "goes on after epoch 2" in said and str(previous) in said

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {newest.parent / 'exploded'}",)
    newest.write_bytes(pickle.dumps(Bomb()))
    torch.save({"states": Bomb()}, previous)
    assert without_seconds(GRAD.train("acl", 0, data, args)) == without_seconds(straight)
    said = capsys.readouterr().out
    assert said.count("can't be read") == 2 and "goes on" not in said and not (newest.parent / "exploded").exists()


@contextlib.contextmanager
def full_disk(size):
    """Inside, no file may grow over `size` bytes, as if the disk were full. pytest's own output may be such a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_while_a_checkpoint_is_saved(settings):
    """One sentence, no temporary file; the checkpoint before is whole and the run goes on from it."""
    args = settings(**OWN)
    prepare(args)
    model = torch.nn.Linear(300, 300)
    before = [weight.clone() for weight in model.parameters()]
    save_checkpoint(args, "x", [model], [1])
    model.weight.data.zero_()
    with full_disk(100_000), pytest.raises(InputError, match="x.checkpoint.pt: can't be written .*; what was there before is whole"):
        save_checkpoint(args, "x", [model], [1, 2])
    assert not list(run_folder(args).glob("*.tmp"))
    args.fresh = False
    assert resume(args, "x", [model]) == [1]
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters()))


def test_disk_full_while_other_files_are_saved(settings, tmp_path):
    """A record and a saved model that were there before stay as they were; nothing temporary is left."""
    args = settings(**OWN)
    prepare(args)
    tokenizer, backbone = load_backbone("tiny")
    write_record(args, "m", 0, [])
    save_model(tmp_path / "model", tokenizer, multi_exit(backbone), {"exit": "mha"})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with full_disk(1000), pytest.raises(InputError, match="m-seed0.json"):
        write_record(args, "m", 0, [{"scores": [0] * 1000}])
    with full_disk(1000), pytest.raises(InputError, match="model"):
        save_model(tmp_path / "model", tokenizer, multi_exit(backbone), {"exit": "mha"})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.rglob("*.tmp"))


def call(monkeypatch, capsys, script, *flags):
    """Runs a script's main in this process. → what it printed"""
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"{script.__name__[7:]}.py"), "--device", "cpu", *flags])
    capsys.readouterr()
    script.main()
    return capsys.readouterr().out


def test_finished_runs_are_read_again(monkeypatch, capsys, tmp_path):
    """The same command trains nothing and prints the same tables; one more seed trains that one; --fresh all."""
    trained, real = [], GRAD.train
    monkeypatch.setattr(GRAD, "train", lambda *which: (trained.append(which[:2]), real(*which))[1])
    flags = ("--limit", "40", "--epochs", "1", "--methods", "acl", "--out", str(tmp_path))
    first = call(monkeypatch, capsys, GRAD, *flags)
    again = call(monkeypatch, capsys, GRAD, *flags)
    assert trained == [("acl", 0)] and "acl seed 0: finished before, read from" in again
    assert first[first.index("| method"):] == again[again.index("| method"):]
    call(monkeypatch, capsys, GRAD, *flags, "--seeds", "0", "1")
    assert trained == [("acl", 0), ("acl", 1)]
    call(monkeypatch, capsys, GRAD, *flags, "--fresh")
    assert trained == [("acl", 0), ("acl", 1), ("acl", 0)]
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("change", [["--lr", "1e-3"], ["--angle", "80"], ["--limit", "41"], ["--tau", "0.3"]])
def test_changed_settings_never_mix(monkeypatch, capsys, tmp_path, change):
    """Other settings, other folder: the run is trained, and the record of the first stays as it is."""
    flags = ("--limit", "40", "--epochs", "1", "--methods", "acl", "--out", str(tmp_path))
    call(monkeypatch, capsys, GRAD, *flags)
    [path] = tmp_path.rglob("*.json")
    before = path.read_bytes()
    said = call(monkeypatch, capsys, GRAD, *flags, *change)
    assert "finished before" not in said and len(list(tmp_path.rglob("*.json"))) == 2 and path.read_bytes() == before


def test_changed_data_weights_or_code_never_mix(monkeypatch, settings, roberta_dir, tmp_path):
    """The folder of a run depends on its examples, its pretrained weights, and the code that trains it."""
    folders, script = set(), tmp_path / "script.py"
    for data, code, scale in (("good", "1", 1), ("bad", "1", 1), ("good", "2", 1), ("good", "1", 1.5)):
        own = tmp_path / "own"
        own.mkdir(exist_ok=True)
        for split in ("train", "dev"):
            (own / f"{split}.csv").write_text(f"sentence,label\nthe film is {data},1\nthe film is dull,0\n")
        tokenizer, backbone = load_backbone(str(roberta_dir))
        backbone.embeddings.word_embeddings.weight.data.mul_(scale)
        tokenizer.save_pretrained(tmp_path / "model")
        backbone.save_pretrained(tmp_path / "model")
        script.write_text(code)
        args = settings("--task", str(own), "--model", str(tmp_path / "model"), "--max_length", "40")
        monkeypatch.setattr(sys, "argv", [str(script)])
        prepare(args)
        folders.add(run_folder(args))
    assert len(folders) == 4
    prepare(args)
    assert run_folder(args) in folders


def start(name, *flags, **environment):
    """A script in a process of its own, one thread, its output line by line."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1",
                   "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, str(ROOT / f"{name}.py"), *flags], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c(tmp_path):
    """One line, exit code 130, nothing half-written; the same command goes on and finishes."""
    flags = ("--limit", "640", "--epochs", "3", "--methods", "acl", "--out", str(tmp_path))
    process = start("03_acl_grad", *flags)
    for line in process.stdout:
        if "epoch 1/3" in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and len(err.strip().splitlines()) == 1 and "interrupted" in err
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.json"))
    out, err = start("03_acl_grad", *flags).communicate(timeout=120)
    assert "acl-seed0: goes on after epoch " in out and "epoch 3/3" in out and err == ""


def test_killed_five_times(tmp_path):
    """SIGKILL at random moments, then a run to the end: records as of a run that nobody disturbed."""
    flags = ("--limit", "320", "--epochs", "4")
    _, err = start("03_acl_grad", *flags, "--out", str(tmp_path / "undisturbed")).communicate(timeout=170)
    assert err == ""
    moments = random.Random(7)
    for _ in range(5):
        process = start("03_acl_grad", *flags, "--out", str(tmp_path / "killed"))
        process.stdout.readline()                           # it is about to train
        time.sleep(moments.uniform(0, 3))
        process.kill()
        process.communicate()
    _, err = start("03_acl_grad", *flags, "--out", str(tmp_path / "killed")).communicate(timeout=170)
    assert err == ""
    paths = sorted((tmp_path / "killed").rglob("*.json"))
    assert len(paths) == 2 and not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.tmp"))
    for path in paths:
        [other] = (tmp_path / "undisturbed").rglob(path.name)
        assert same(json.loads(path.read_text())["epochs"], json.loads(other.read_text())["epochs"])


# ------------------------------------------------------------------------------------------ several processes

def cells(text):
    """The first table of a script's output, without its minutes."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    minutes = rows[0].index("minutes")
    return [row[:minutes] + row[minutes + 1:] if len(row) == len(rows[0]) else row for row in rows]


def test_torchrun_shares_the_runs(tmp_path):
    """Two processes and four seeds: each run once, one table, equal to that of a single process."""
    flags = ("--limit", "64", "--epochs", "1", "--seeds", "0", "1", "2", "3")
    alone, _ = start("01_pilot_gradient_angle", *flags, "--out", str(tmp_path / "alone")).communicate(timeout=170)
    shared = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
         str(ROOT / "01_pilot_gradient_angle.py"), *flags, "--device", "cpu", "--out", str(tmp_path / "shared")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}, capture_output=True, text=True, timeout=170)
    assert shared.returncode == 0, shared.stderr
    assert cells(shared.stdout) == cells(alone)
    assert shared.stdout.count("epoch 1/1") == 8 and shared.stdout.count("task toy:") == 1
    assert len(list((tmp_path / "shared").rglob("*.json"))) == 8


def test_an_array_of_jobs_shares_the_runs(monkeypatch, capsys, settings, tmp_path):
    """RANK and WORLD_SIZE alone, one after the other: the first says what is missing, and prints the table later."""
    flags = ("--limit", "33", "--epochs", "1", "--seeds", "0", "1", "2", "--methods", "ce", "--out", str(tmp_path))
    said = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for turn in ("0", "1", "0 again"):
        monkeypatch.setenv("RANK", turn[0])
        monkeypatch.setattr(sys, "argv", [str(ROOT / "02_acl_embed.py"), "--device", "cpu", *flags])
        with pytest.raises(SystemExit) if turn != "0 again" else open(os.devnull):
            EMBED.main()
        said[turn] = capsys.readouterr().out
    assert "1 of 3 runs are missing: ce seed 1;" in said["0"] and "| method" not in said["0"]
    assert "ce seed 1 epoch 1/1" in said["1"] and "| method" not in said["1"] and "task toy" not in said["1"]
    assert "| ce " in said["0 again"]


@pytest.mark.parametrize("name, value", [("RANK", "2"), ("RANK", "x"), ("WORLD_SIZE", "-1")])
def test_bad_environment(monkeypatch, capsys, name, value):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["01_pilot_gradient_angle.py"])
    with pytest.raises(SystemExit) as error:
        run(PILOT.main)
    assert error.value.code == 2 and f"environment variable {name}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ collapsed runs

def test_collapsed_runs_are_flagged_and_counted(settings):
    """One class predicted although dev has two: said after the epoch, counted in the table; else no such column."""
    def record(method, seed, predictions):
        scores = common.glue_scores("toy", predictions, [0, 1, 1])
        epoch = {"scores": scores, "exits": [scores, common.glue_scores("toy", [0, 1, 0], [0, 1, 1])], "seconds": 60,
                 "angles": {"all": []}, "loss": 1.0, "skipped": 0}
        return {"method": method, "seed": seed, "layers": [1, 2], "epochs": [epoch],
                "parameters": {"backbone": 10, "exits": 1}}
    good, bad = record("acl", 0, [0, 1, 1]), record("acl", 1, [1, 1, 1])
    assert "collapsed" not in score_table([good]) + layer_table([good])
    lines = score_table([good, bad]).splitlines()
    assert lines[0].split("|")[-2].strip() == "collapsed" and lines[2].split("|")[-2].strip() == "1"
    assert "| exits collapsed" in layer_table([good, bad]) and "1 of 4" in layer_table([good, bad])
    assert "collapsed" in common.epoch_line("acl", 1, 1, bad["epochs"])
    assert "collapsed" not in common.glue_scores("toy", [1, 1], [1, 1])
