"""One's own data: folders of CSV, TSV and JSON lines, wrong files, wrong models, wrong flags, labelling a file."""

import csv
import io
import json
import random
import re
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from torch import nn

import common
from common import (Example, InputError, MHAExit, early_exit, encode, glue_scores, load_backbone, load_task, make_batch,
                    prepare, run, save_model, toy_examples)
from conftest import load_script
from test_exits import diverse

SUFFIXES = ("csv", "tsv", "jsonl")
SINGLE, PAIR = ("sentence", "label"), ("sentence1", "sentence2", "label")
TRAIN = [("the plot was dull, very dull", "bad"), ('he said "fine"', "good"), ('"a quote that stays open', "good"),
         ("null", "so so"), ("it's cold", "bad"), ("", "so so")]
DEV = [("music was superb", "good"), ('""', "so so"), ("weak cast", "bad")]
GOOD = {"train.csv": "sentence,label\nfine film,good\ndull plot,bad\n", "dev.csv": "sentence,label\nfine,good\n"}


def as_file(suffix, names, rows):
    """Rows as the bytes of a .csv, .tsv or .jsonl file."""
    if suffix == "csv":
        text = io.StringIO(newline="")
        csv.writer(text).writerows([names, *rows])
        return text.getvalue().encode()
    if suffix == "tsv":
        return "".join("\t".join(map(str, row)) + "\n" for row in [names, *rows]).encode()
    return "".join(json.dumps(dict(zip(names, row))) + "\n" for row in rows).encode()


def write_folder(folder, files):
    """Writes text or bytes under each name; None: no such file, a dict: a folder in its place. → folder"""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
        elif content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_task(folder, suffix, train, dev, names=SINGLE):
    return write_folder(folder, {f"train.{suffix}": as_file(suffix, names, train),
                                 f"dev.{suffix}": as_file(suffix, names, dev)})


def named(task, examples):
    """Examples as rows of a file: texts, then the label's name."""
    return [tuple(text for text in example[:2] if text is not None) + (task.label_names[example.label],)
            for example in examples]


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    """script("03_acl_grad", "--epochs", "1") → what it printed, stdout and stderr."""
    def call(name, *flags):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(tmp_path / "runs"), "--device", "cpu",
                                          "--precision", "fp32", *flags])
        capsys.readouterr()
        load_script(name).main()
        return capsys.readouterr()
    return call


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """refused("03_acl_grad", "--tau", "0") → the one sentence on stderr; exit code 2, no stack trace, no output."""
    def call(name, *flags):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(tmp_path / "runs"), *flags])
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            run(load_script(name).main)
        said, lines = capsys.readouterr()
        assert error.value.code == 2 and said == "" and "Traceback" not in lines
        lines = lines.splitlines()
        assert len(lines) == 1 or lines[0].startswith("usage:"), lines
        assert "error: " in lines[-1]
        return lines[-1]
    return call


# ------------------------------------------------------------------------------------------------ good folders

@pytest.mark.parametrize("names, columns", [(SINGLE, None), (("text", "class"), ["text", "class"])])
def test_three_formats_one_task(tmp_path, names, columns):
    """The same rows in each format: the same examples in the same order, nothing stripped, nothing lost."""
    tasks = [load_task(str(write_task(tmp_path / suffix, suffix, TRAIN, DEV, names)), columns=columns)
             for suffix in SUFFIXES]
    assert tasks[0] == tasks[1] == tasks[2]
    assert tasks[0].label_names == ("bad", "good", "so so") and tasks[0].num_labels == 3
    assert tasks[0].columns == (names[0],) and tasks[0].dev_mismatched is None
    assert named(tasks[0], tasks[0].train) == TRAIN and named(tasks[0], tasks[0].dev) == DEV


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("columns", [None, ["sentence1", "sentence2", "label"], ["sentence2", "id", "label"],
                                     ["sentence2", "label"]])
def test_columns_of_pairs(tmp_path, suffix, columns):
    """Columns are found by name wherever they stand; --columns chooses which, and in which order."""
    names = ["id", "label", "sentence2", "sentence1"]
    rows = [("7", "no", "film", "plot, cast"), ("8", "yes", 'so "so"', ""), ("9", "no", "", "music")]
    task = load_task(str(write_task(tmp_path / "own", suffix, rows, rows[:2], names)), columns=columns)
    at = [names.index(name) for name in columns or PAIR]
    assert named(task, task.train) == [tuple(row[i] for i in at) for row in rows]
    assert len(task.dev) == 2 and all((example.sentence2 is None) == (len(at) == 2) for example in task.train)


@pytest.mark.parametrize("train", SUFFIXES)
@pytest.mark.parametrize("dev", SUFFIXES)
def test_formats_may_differ(tmp_path, train, dev):
    """train in one format, validation in another; --limit cuts train alone."""
    folder = write_folder(tmp_path / "own", {f"train.{train}": as_file(train, SINGLE, TRAIN),
                                             f"validation.{dev}": as_file(dev, SINGLE, DEV)})
    task = load_task(str(folder))
    assert (named(task, task.train), named(task, task.dev)) == (TRAIN, DEV)
    assert load_task(str(folder), limit=4) == task._replace(train=task.train[:4])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("tail", ["", "end", "ends"])
def test_csv_quoting(tmp_path, end, mark, tail):
    """Quoted commas, doubled quotation marks, line ends inside quotes; a quotation mark inside a word is text."""
    lines = ['"sentence",label', '"one, two",1', '"he said ""no"", twice",0', f'"first{end}second"", third",1',
             '5" nails,0', '"",1', '" spaced ",0']
    text = mark + end.join(lines) + {"": "", "end": end, "ends": 3 * end}[tail]
    folder = write_folder(tmp_path / "own", {"train.csv": text, "dev.csv": GOOD["dev.csv"].replace("good", "1")})
    assert [example.sentence1 for example in load_task(str(folder)).train] == [
        "one, two", 'he said "no", twice', f'first{end}second", third', '5" nails', "", " spaced "]


def test_tsv_has_no_quoting(tmp_path):
    """Quotation marks and commas are text, even one that opens a field and one that ends it three lines on."""
    texts = ['"one', "two, three", 'four"', '""', '"five"']
    folder = write_folder(tmp_path / "own", {
        "train.tsv": "sentence\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(texts)),
        "dev.tsv": "sentence\tlabel\nsix\t1"})
    assert [example.sentence1 for example in load_task(str(folder)).train] == texts


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("labels, names", [
    (["10", "9", "-1", "9"], ("-1", "9", "10")), (["10", "9", "a"], ("10", "9", "a")), (["b", "a"], ("a", "b")),
    (["yes", "no", "Maybe"], ("Maybe", "no", "yes")), (["1.5", "1"], ("1", "1.5")), (["ж", "é", "z"], ("z", "é", "ж")),
    ([" 1", "0 ", "1"], ("0", "1")), ([str(k) for k in range(30)], tuple(str(k) for k in range(30)))])
def test_order_of_the_labels(tmp_path, suffix, labels, names):
    """Integers by size, all else by the alphabet, whichever comes first in the file; spaces around are none of it."""
    rows = [("film", label) for label in labels]
    tasks = [load_task(str(write_task(tmp_path / folder, suffix, each, rows[:1])))
             for folder, each in (("one", rows), ("two", rows[::-1]))]
    assert tasks[0].label_names == tasks[1].label_names == names
    assert [names[example.label] for example in tasks[0].train] == [label.strip() for label in labels]


def test_json_integer_and_string_are_one_label(tmp_path):
    lines = ['{"sentence": "a", "label": 1}', '{"sentence": "b", "label": "1"}', '{"sentence": "c", "label": 10}',
             '{"label": "9", "sentence": "d", "more": [null, 1.5]}']
    task = load_task(str(write_folder(tmp_path / "own", {"train.jsonl": "\r\n".join(lines) + "\n\n",
                                                         "dev.jsonl": lines[1]})))
    assert task.label_names == ("1", "9", "10") and [example.label for example in task.train] == [0, 0, 2, 1]
    assert [example.sentence1 for example in task.train] == list("abcd") and task.dev[0].label == 0


def test_mapping_is_printed(tmp_path, settings, capsys):
    """prepare() says which labels there are, in the order of their ids, and how many examples each has."""
    rows = [("film", "10")] * 3 + [("plot", "9")] * 2 + [("cast", "-5")] * 1300
    prepare(settings("--task", str(write_task(tmp_path / "own", "csv", rows, rows[:1])), "--model", "tiny"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("task own: 1,305 train, 1 dev, 3 classes")
    assert re.fullmatch(r"labels in train: .*-5\W+1,300\b.*\b9\W+2\b.*\b10\W+3\b.*", lines[1]) and len(lines) == 2


@pytest.mark.parametrize("seed", range(20))
def test_scores(seed):
    """Accuracy is the headline; macro-F1 is sklearn's, and the mean of the classes' F1 counted one by one."""
    rng = random.Random(seed)
    K, n = rng.randint(2, 8), rng.randint(1, 40)
    y, p = ([rng.randrange(K) for _ in range(n)] for _ in range(2))
    p = [a if rng.random() < 0.5 else b for a, b in zip(y, p)]
    f1s = []
    for k in {*y, *p}:
        hits = sum(a == b == k for a, b in zip(y, p))
        precision, recall = (hits / each.count(k) if each.count(k) else 0 for each in (p, y))
        f1s.append(2 * precision * recall / (precision + recall) if hits else 0)
    for labels, predictions in ((y, p), (np.array(y), np.array(p)), (torch.tensor(y), torch.tensor(p))):
        scores = glue_scores("some/folder", predictions, labels)
        assert scores["score"] == scores["accuracy"] == pytest.approx(100 * sum(a == b for a, b in zip(y, p)) / n)
        assert scores["macro_f1"] == pytest.approx(100 * sum(f1s) / len(f1s))
        assert scores["macro_f1"] == pytest.approx(100 * f1_score(y, p, average="macro"))
        assert scores.get("collapsed", False) == (len(set(p)) == 1 < len(set(y)))
    assert "macro_f1" not in glue_scores("rte", p, y) and "macro_f1" not in glue_scores("toy", p, y)


# ------------------------------------------------------------------------------------------------- wrong files

def jsonl(*lines):
    """Files with these lines after a good first one, in place of train.csv."""
    first = '{"sentence": "a", "label": "good"}\n{"sentence": "b", "label": "bad"}\n'
    return {"train.csv": None, "train.jsonl": first + "\n".join(lines) + "\n"}


WRONG_FILES = [
    ({"train.csv": None}, ["no file for the train split", "train.csv, train.tsv, train.jsonl"]),
    ({"dev.csv": None}, ["no file for the dev split", "dev.csv", "validation.jsonl"]),
    ({"train.tsv": "sentence\tlabel\na\tgood\n"}, ["train.csv and train.tsv", "expected one of"]),
    ({"validation.csv": GOOD["dev.csv"]}, ["dev.csv and validation.csv", "expected one of"]),
    ({"train.csv": ""}, ["train.csv", "empty file", "sentence, label"]),
    ({"train.csv": "\n\r\n\n"}, ["train.csv", "empty file"]),
    ({"dev.csv": "\ufeff"}, ["dev.csv", "empty file"]),
    ({"train.csv": "sentence,label\n"}, ["train.csv", "no examples", "expected at least one"]),
    ({"dev.csv": "sentence,label\r\n\r\n"}, ["dev.csv", "no examples"]),
    ({"train.csv": GOOD["train.csv"].encode("utf-16")}, ["train.csv line 1", "0xff", "UTF-8"]),
    ({"train.csv": GOOD["train.csv"].encode("utf-16-le")}, ["train.csv line 1", "expected"]),
    ({"train.csv": b"sentence,label\nfine,good\nna\xefve,bad\n"}, ["train.csv line 3", "0xef", "UTF-8"]),
    ({"dev.csv": b"sentence,label\ncaf\xe9,bad\n"}, ["dev.csv line 2", "0xe9", "UTF-8"]),
    ({"train.csv": "sentence,label\na,good\nb, c,bad\n"}, ["train.csv line 3", "found 3", "expected 2"]),
    ({"train.csv": "sentence,label\na,good\nbad\n"}, ["train.csv line 3", "found 1", "expected 2"]),
    ({"train.csv": "sentence,label\na,good\n\nb,bad\n"}, ["train.csv line 3", "expected 2"]),
    ({"train.csv": 'sentence,label\n"a\nb\n",good\nbad\n'}, ["train.csv line 5", "found 1", "expected 2"]),
    ({"train.csv": None, "train.tsv": "sentence\tlabel\na\tgood\nb\tc\tbad\n"}, ["train.tsv line 3", "found 3"]),
    ({"train.csv": None, "train.tsv": "sentence,label\na,good\n"}, ["train.tsv line 1", "sentence,label"]),
    ({"train.csv": "text,label\na,good\n"}, ["train.csv line 1", "text, label", "sentence, label"]),
    ({"train.csv": "sentence1,label\na,good\n"}, ["train.csv line 1", "sentence1, sentence2, label"]),
    ({"train.csv": "sentence,class\na,good\n"}, ["train.csv line 1", "sentence, class", "sentence, label among them"]),
    ({"dev.csv": "sentence\nfine\n"}, ["dev.csv line 1", "found columns sentence", "label"]),
    ({"dev.csv": "sentence1,sentence2,label\na,b,good\n"}, ["dev.csv line 1", "expected sentence, label"]),
    ({"train.csv": "sentence,label,label\na,good,bad\n"}, ["train.csv line 1", "label twice"]),
    ({"train.csv": "sentence,sentence,label\na,b,bad\n"}, ["train.csv line 1", "sentence twice"]),
    ({"train.csv": "sentence,label\na,good\nb,\n"}, ["train.csv line 3", "''", "expected a word or an integer"]),
    ({"dev.csv": "sentence,label\na, \n"}, ["dev.csv line 2", "' '", "expected a word or an integer"]),
    ({"train.csv": 'sentence,label\na,good\nb,"x\ny"\n'}, ["train.csv line", r"'x\ny'", "expected a word"]),
    *((jsonl(f'{{"sentence": "c", "label": {label}}}'), ["train.jsonl line 3", found, "expected a word or an integer"])
      for label, found in (("null", "None"), ("1.0", "1.0"), ("1e2", "100.0"), ("NaN", "nan"), ("true", "True"),
                           ("[1]", "[1]"), ('""', "''"), ('"\\ud800"', "\\ud800"))),
    (jsonl('{"sentence": "c"}'), ["train.jsonl line 3", "None", "expected a word or an integer"]),
    *((jsonl('{"sentence": ' + text + ', "label": "bad"}'), ["train.jsonl line 3", found, "expected text"])
      for text, found in (("5", "5"), ("null", "None"), ('["a"]', "['a']"), ("true", "True"), ('"\\ud800"', "\\ud800"),
                          ('"caf\\u00e9 \\udfff."', "\\udfff"))),
    (jsonl('{"label": "bad"}'), ["train.jsonl line 3", "expected text"]),
    (jsonl('{"sentence": "c", "sentence": "d", "label": "bad"}'), ["train.jsonl line 3", "each key once"]),
    *((jsonl(line), ["train.jsonl line 3", "expected a JSON object"])
      for line in ("[1]", "5", "null", '"text"', "not JSON", '{"sentence": "c", "label": "bad"', '{"a": 1} {"b": 2}',
                   "\n" + '{"sentence": "c", "label": "bad"}', "\ufeff{}", "[" * 100_000)),
    ({"train.csv": None, "train.jsonl": "[\n{}\n]"}, ["train.jsonl line 1", "'['", "expected a JSON object"]),
    ({"train.csv": None, "train.jsonl": "{}\n{}"}, ["train.jsonl", "sentence, label"]),
    ({"train.csv": 'sentence,label\na,good\n"b,bad\nc,bad\n'}, ["train.csv line 3", "CSV"]),
    ({"train.csv": '"sentence,label\na,good\n'}, ["train.csv line 1", "CSV"]),
    ({"train.csv": 'sentence,label\n"a" b,good\n'}, ["train.csv line 2", "CSV"]),
    ({"dev.csv": "sentence,label\na,so so\n"}, ["dev.csv line 2", "'so so'", "train.csv lacks", "bad, good"]),
    ({"dev.csv": "sentence,label\na,Good\n"}, ["dev.csv line 2", "'Good'", "bad, good"]),
    ({"train.csv": "sentence,label\na,good\nb,good\n"}, ["--task", "only good", "2 training", "two classes"]),
    ({"train.csv": "sentence,label\n" + "".join(f"a,{k / 100}\n" for k in range(300))},
     ["train.csv", "300 different labels", "column label", "expected classes"]),
    ({"train.csv": "sentence,label\n" + "".join(f"a,{k % 30 / 10}\n" for k in range(3000))},
     ["train.csv", "30 different labels", "column label", "expected classes"]),
    ({"train.csv": {}}, ["train.csv", "directory"]),
    ({"dev.csv": {}}, ["dev.csv", "directory"])]


@pytest.mark.parametrize("files, parts", WRONG_FILES, ids=lambda value: " · ".join(value) if isinstance(value, list)
                         else None)
def test_wrong_file(tmp_path, refused, files, parts):
    """One sentence with the file, the line, what was found, what was expected; the same from the function."""
    folder = write_folder(tmp_path / "own", {**GOOD, **files})
    message = refused("03_acl_grad", "--task", str(folder), "--model", "tiny", "--device", "cpu")
    assert all(part in message for part in [str(folder), *parts]), message
    with pytest.raises(InputError) as error:
        load_task(str(folder))
    assert message == f"error: {error.value}" and not list(tmp_path.rglob("*.json"))


def test_limit_leaves_one_class(tmp_path, refused):
    folder = write_folder(tmp_path / "own", GOOD)
    message = refused("03_acl_grad", "--task", str(folder), "--model", "tiny", "--limit", "1")
    assert all(part in message for part in ("--limit 1", "only good", "two classes")), message


@pytest.mark.parametrize("name, content", [
    ("train.csv", 'sentence,"la\nbel"\na,good\n'), ("train.csv", 'sentence,label,"x\ny"\na,good\n'),
    ("train.tsv", "sentence\tla\rbel\na\tgood\n"), ("train.jsonl", '{"sentence": "a", "la\\nbel": "good"}\n')])
def test_line_ends_among_the_column_names(tmp_path, refused, name, content):
    """The message quotes the columns that were found, and stays one line."""
    folder = write_folder(tmp_path / "own", {"dev.csv": GOOD["dev.csv"], name: content})
    assert name in refused("03_acl_grad", "--task", str(folder), "--model", "tiny")


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_label_of_five_thousand_digits(tmp_path, suffix):
    """Python makes no integer of it. As a class or as one sentence, but not as a stack trace."""
    rows = [("a", "1"), ("b", "7" * 5000)]
    folder = write_task(tmp_path / "own", suffix, rows, rows[:1])
    try:
        assert len(load_task(str(folder)).train) == 2
    except InputError as error:
        assert f"train.{suffix}" in str(error)


# ----------------------------------------------------------------------------------------------- odd, but valid

ODD = ["", " ", "\u3000\u00a0 ", "\x00", "film\x00plot", "\x1b[31mred\x07\x08", "a\u2028b\u2029c",
       "a\x85b\x0bc\x0cd\x1ce", "\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{SNOWMAN}", "фильм скучный", "映画は退屈だった",
       "فيلم ممل", "e\u0301\u202e", "\ufeff", "\uffff\U0010ffff", "[SEP] [CLS] <s>", "NA", "#N/A", "-", "'"]
LONG = ["the film was great " * 2500, "x" * 200_000]
BROKEN = ["two\nlines", "two\r\nlines", "a\rb", "tab\tin it", "\n", "\r\n\r\n", '"\n"', ',"\n",']


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_odd_texts_stay_as_they_are(tmp_path, suffix):
    """Whatever a text is made of, it comes back as it was written; line ends too, in the formats that know them."""
    texts = ODD + LONG + BROKEN * (suffix != "tsv")
    rows = [(text, str(i % 2)) for i, text in enumerate(texts)]
    task = load_task(str(write_task(tmp_path / "own", suffix, rows, rows[::-1])))
    assert [example.sentence1 for example in task.train] == texts
    assert [example.sentence1 for example in task.dev] == texts[::-1]


@pytest.mark.parametrize("names", [SINGLE, PAIR])
def test_odd_texts_run(tmp_path, script, names):
    """A run on nothing but odd texts: finite losses, macro-F1 in the record, the notes printed."""
    texts = ODD + LONG + BROKEN
    rows = [(*[texts[i], texts[i - 5]][:len(names) - 1], i % 3) for i in range(len(texts))]
    said = script("03_acl_grad", "--task", str(write_task(tmp_path / "own", "jsonl", rows, rows[:7], names)),
                  "--model", "tiny", "--epochs", "1", "--seeds", "0", "--methods", "acl").out
    assert said.splitlines()[0].startswith(f"task own: {len(rows)} train, 7 dev, 3 classes")
    assert "labels in train: " in said and "macro_f1" in said
    record = json.loads(next((tmp_path / "runs").rglob("acl-seed0.json")).read_text())
    scores = record["epochs"][0]["scores"]
    assert np.isfinite(record["epochs"][0]["loss"]) and scores["score"] == scores["accuracy"]
    assert 0 <= scores["macro_f1"] <= 100


def test_two_long_texts_take_no_longer_than_one():
    """A pair of 5,000 words each is cut in a fraction of a second, not in time that grows with the square."""
    tokenizer, words = load_backbone("tiny")[0], "the film was great but " * 1000
    encode(tokenizer, [Example(words, "film", 0)], 128)
    started = time.process_time()
    split = encode(tokenizer, [Example(words, words, 0)], 128)
    assert list(split.lengths) == [128] and split.truncated == 100
    assert time.process_time() - started < 1


@pytest.mark.parametrize("cut, unknown, notes", [
    (0, 0, []), (2, 0, []), (3, 0, ["1.5 % of the examples", "16 tokens"]), (0, 6, []),
    (0, 7, ["1.2 % of the tokens", "unknown"])])
def test_notes_from_one_percent_on(tmp_path, settings, capsys, cut, unknown, notes):
    """200 examples of three tokens each, of which `cut` are too long and `unknown` unknown; each split for itself."""
    texts = ["film"] * (200 - cut - unknown) + ["zebra"] * unknown + ["film " * 20] * cut
    rows, clean = [(text, i % 2) for i, text in enumerate(texts)], [("film", 0), ("plot", 1)]
    for train, dev, name in ((rows, clean, "train"), (clean, rows, "dev")):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        folder = write_task(tmp_path / "own", "tsv", train, dev)
        prepare(settings("--task", str(folder), "--model", "tiny", "--max_length", "16"))
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
        assert len(said) == bool(notes)
        assert all(line.startswith(f"note: {name}: ") and all(part in line for part in notes) for line in said), said


# ------------------------------------------------------------------------------------------------------- models

def change_config(**settings_):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings_}))
    return change


def cut_file(name, share):
    def change(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:int(share * len(content))])
    return change


@pytest.mark.parametrize("change", [
    pytest.param(lambda folder: (folder / "config.json").unlink(), id="no config.json"),
    pytest.param(lambda folder: (folder / "config.json").write_text("{not JSON"), id="config.json not JSON"),
    pytest.param(lambda folder: (folder / "config.json").write_text("[1]"), id="config.json a list"),
    pytest.param(change_config(model_type="gpt2"), id="gpt2"),
    pytest.param(change_config(model_type="nosuch"), id="unknown family"),
    pytest.param(change_config(hidden_size=64), id="config.json of another width"),
    pytest.param(change_config(hidden_size="wide"), id="config.json with a word for a number"),
    pytest.param(lambda folder: (folder / "model.safetensors").unlink(), id="no weights"),
    pytest.param(cut_file("model.safetensors", 0.9), id="weights cut off"),
    pytest.param(cut_file("model.safetensors", 0), id="weights empty"),
    pytest.param(cut_file("tokenizer.json", 0.5), id="tokenizer cut off"),
    pytest.param(lambda folder: [file.unlink() for file in folder.glob("token*")], id="no tokenizer")])
def test_wrong_model(tmp_path, roberta_dir, refused, change):
    """One sentence that names --model and the folder; exit code 2."""
    folder = tmp_path / "model"
    shutil.copytree(roberta_dir, folder)
    change(folder)
    message = refused("03_acl_grad", "--model", str(folder), "--max_length", "40", "--limit", "8", "--epochs", "1")
    assert message.startswith(f"error: --model {folder}: "), message


@pytest.mark.parametrize("name", ["weights.bin", "folder/weights.bin", "./weights.bin"])
def test_a_file_as_model(tmp_path, monkeypatch, refused, name):
    """By its path from here or from the root."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(bytes(range(256)))
    for path in (name, str(tmp_path / name)):
        assert f"--model {path}: " in refused("03_acl_grad", "--model", path)


def test_half_precision_is_loaded_as_float32(roberta_dir):
    """Every weight: the file's value, in float32."""
    saved = load_file(roberta_dir / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float16}
    _, backbone = load_backbone(str(roberta_dir))
    for name, weight in backbone.named_parameters():
        assert weight.dtype == torch.float32 and torch.equal(weight, saved[name].float())


# -------------------------------------------------------------------------------------------------------- flags

WRONG_FLAGS = [("03_acl_grad", flags, parts) for flags, parts in [
    (["--lam", "-0.1"], ["--lam", "'-0.1'", "≥ 0 and ≤ 1"]), (["--lam", "1.01"], ["--lam", "'1.01'", "≤ 1"]),
    (["--lam", "nan"], ["--lam", "'nan'", "≤ 1"]), (["--lam", "much"], ["--lam", "'much'", "float"]),
    (["--tau", "0"], ["--tau", "'0'", "> 0"]), (["--tau", "-1"], ["--tau", "'-1'", "> 0"]),
    (["--tau", "inf"], ["--tau", "'inf'", "> 0"]), (["--angle", "-1"], ["--angle", "'-1'", "≥ 0 and ≤ 180"]),
    (["--angle", "180.5"], ["--angle", "'180.5'", "≤ 180"]), (["--epochs", "0"], ["--epochs", "'0'", "int ≥ 1"]),
    (["--epochs", "1.5"], ["--epochs", "'1.5'", "int"]), (["--epochs", "-3"], ["--epochs", "'-3'", "≥ 1"]),
    (["--epochs", "9" * 400], ["--epochs", "≥ 1"]), (["--batch_size", "0"], ["--batch_size", "'0'", "≥ 1"]),
    (["--batch_size", "-8"], ["--batch_size", "'-8'", "≥ 1"]), (["--max_length", "7"], ["--max_length", "'7'", "≥ 8"]),
    (["--limit", "0"], ["--limit", "'0'", "≥ 1"]), (["--lr", "0"], ["--lr", "'0'", "> 0"]),
    (["--seeds", "-1"], ["--seeds", "'-1'", "≥ 0"]), (["--seeds", "3", "4", "3"], ["--seeds", "3 4 3", "distinct"]),
    (["--seeds", "4294967296"], ["--seeds", "'4294967296'", "≤ 4.29497e+09"]),
    (["--device", "cuda:99"], ["--device", "cuda:99"]), (["--device", "cuda:-1"], ["--device", "cuda:-1"]),
    (["--device", "cuda:99999999999999999999"], ["--device", "cuda"]), (["--device", "cuda:"], ["--device", "cuda:"]),
    (["--device", "meta"], ["--device", "meta", "cuda, mps or cpu"]),
    (["--precision", "fp16"], ["--precision", "fp16", "bf16"]),
    (["--task", "nosuch"], ["--task", "'nosuch'", "toy", "rte", "folder with train and dev files"]),
    (["--task", "{own}/train.csv"], ["--task", "train.csv", "folder with train and dev files"]),
    (["--task", "{own}", "--data_dir", "glue"], ["--data_dir", "GLUE", "own"]),
    (["--columns", "sentence", "label"], ["--columns", "found --task toy", "path/to/folder"]),
    (["--task", "rte", "--columns", "sentence", "label"], ["--columns", "found --task rte", "path/to/folder"]),
    (["--task", "{own}", "--columns", "sentence"], ["--columns", "found sentence", "one or two text columns"]),
    (["--task", "{own}", "--columns", *"abcd"], ["--columns", "a b c d", "one or two text columns"]),
    (["--task", "{own}", "--columns", *"aab"], ["--columns", "a a b", "distinct"]),
    (["--task", "{own}", "--columns", *"aa"], ["--columns", "a a", "distinct"]),
]] + [("05_acl_cl", flags, parts) for flags, parts in [
    (["--policy", "guess"], ["--policy", "'guess'", "entropy", "patience", "confidence"]),
    (["--threshold", "-1"], ["--threshold", "'-1'", "≥ 0"]), (["--threshold", "nan"], ["--threshold", "'nan'"]),
    (["--threshold", "0.5"], ["--threshold", "expected --predict"]),
    (["--load", "x", "--policy", "patience"], ["--policy", "expected --predict"]),
    (["--load", "x", "--out_file", "y"], ["--out_file", "expected --predict"]),
    (["--load", "x", "--predict", "y", "--threshold", "2"], ["--threshold", "2", "0 … 1", "entropy"]),
    (["--load", "x", "--predict", "y", "--threshold", "1.1", "--policy", "confidence"],
     ["--threshold", "1.1", "0 … 1", "confidence"]),
    (["--predict", "texts.tsv"], ["--predict", "expected --load"]),
    (["--load", "x", "--predict", "y", "--columns", *"abc"], ["--columns", "a b c", "one or two text columns"]),
]]


@pytest.mark.parametrize("name, flags, parts", WRONG_FLAGS, ids=[" ".join(flags)[:50] for _, flags, _ in WRONG_FLAGS])
def test_flags_are_checked_first(tmp_path, monkeypatch, refused, name, flags, parts):
    """The flag, what was found and what was expected, before a model or a file is read."""
    def too_early(*_, **__):
        raise AssertionError("loaded before the flags were checked")
    for function in ("load_backbone", "load_task", "load_model", "read_table"):
        monkeypatch.setattr(common, function, too_early)
    own = write_folder(tmp_path / "own", GOOD)
    message = refused(name, *(flag.replace("{own}", str(own)) for flag in flags))
    assert all(part in message for part in parts), message


# -------------------------------------------------------------------------------------------------- prediction

NAMES = ["bad", "so so", "10"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saved models of six exits and three classes. → folder of one for single texts, of one for pairs, what they are"""
    torch.manual_seed(3)
    tokenizer, backbone = load_backbone("tiny")
    exits = nn.ModuleList(MHAExit(64, 3) for _ in range(6))
    model = nn.ModuleDict({"backbone": backbone, "exits": exits}).eval()
    inputs, _ = make_batch(encode(tokenizer, toy_examples(80, 1)[0], 128), np.arange(80), "cpu")
    diverse(model, inputs)
    folders = [tmp_path_factory.mktemp(name) / "model" for name in ("single", "pair")]
    for folder, columns in zip(folders, (["sentence"], ["sentence1", "sentence2"])):
        save_model(folder, tokenizer, model, {"exit": "mha", "label_names": NAMES, "task": "own", "columns": columns,
                                              "max_length": 40})
    return *folders, (tokenizer, model)


def one_by_one(tokenizer, model, texts, policy, threshold):
    """Label, probability and exit layer of each text (or pair of texts) in a batch of its own."""
    results = []
    for text in texts:
        text = (text,) if isinstance(text, str) else text
        inputs = tokenizer(*([each] for each in text), return_tensors="pt", truncation=True, max_length=40)
        logits, layers = early_exit(model, inputs, policy, threshold)
        probability = torch.exp(logits.double()) / torch.exp(logits.double()).sum()
        results.append((NAMES[int(logits.argmax())], float(probability.max()), int(layers[0])))
    return results


def check_lines(said, wanted):
    """As many lines as texts, in order: "label<TAB>probability<TAB>exit layer"."""
    lines = said.removesuffix("\n").split("\n")
    assert said.endswith("\n") and len(lines) == len(wanted)
    for line, (label, probability, layer) in zip(lines, wanted):
        assert line.split("\t")[::2] == [label, str(layer)]
        assert float(line.split("\t")[1]) == pytest.approx(probability, abs=1e-4)


TO_PREDICT = [example.sentence1 for example in toy_examples(30, 1)[0]] + ODD + ["the film was great " * 30]


@pytest.mark.parametrize("policy, threshold, flags", [
    ("entropy", 0.2, []), ("entropy", 0, ["--threshold", "0"]),
    ("entropy", 1, ["--threshold", "1"]), ("patience", 2, ["--policy", "patience"]),
    ("patience", 5, ["--policy", "patience", "--threshold", "5"]),
    ("confidence", 0.9, ["--policy", "confidence"]),
    ("confidence", 0.6, ["--policy", "confidence", "--threshold", "0.6"])])
def test_predict(tmp_path, script, saved, policy, threshold, flags):
    """The same lines from each format, with a label column and without; those of early_exit, text by text."""
    wanted = one_by_one(*saved[2], TO_PREDICT, policy, threshold)
    printed = set()
    for suffix in SUFFIXES:
        for names in (("sentence",), ("label", "sentence")):
            rows = [("none of the classes", text)[-len(names):] for text in TO_PREDICT]
            if suffix == "jsonl":                                  # a line that is empty is no object
                path = tmp_path / f"texts-{len(names)}.jsonl"
            else:
                rows, path = [(*row, "0") for row in rows], tmp_path / f"texts-{len(names)}.{suffix}"
                names = (*names, "id")
            path.write_bytes(as_file(suffix, names, rows))
            printed.add(script("05_acl_cl", "--load", str(saved[0]), "--predict", str(path), *flags).out)
    assert len(printed) == 1
    check_lines(printed.pop(), wanted)
    layers = {layer for *_, layer in wanted}
    if threshold == 0:
        assert layers == {6}
    elif threshold not in (1, 5):
        assert len(layers) > 2 and len({label for label, *_ in wanted}) == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_predict_pairs(tmp_path, script, refused, saved, suffix):
    """Both columns, under the model's names or those of --columns; one sentence where one of them is missing."""
    pairs = [(a, b) for a, b in zip(TO_PREDICT, TO_PREDICT[7:])]
    path = tmp_path / f"pairs.{suffix}"
    load = ["--load", str(saved[1]), "--predict", str(path), "--threshold", "0.4"]
    wanted = one_by_one(*saved[2], pairs, "entropy", 0.4)
    path.write_bytes(as_file(suffix, ("sentence2", "id", "sentence1"), [(b, 7, a) for a, b in pairs]))
    check_lines(script("05_acl_cl", *load).out, wanted)
    path.write_bytes(as_file(suffix, ("left", "right", "sentence1"), [(*pair, "none") for pair in pairs]))
    check_lines(script("05_acl_cl", *load, "--columns", "left", "right").out, wanted)
    message = refused("05_acl_cl", *load)
    assert all(part in message for part in (str(path), "sentence1, sentence2")), message


@pytest.mark.parametrize("model, columns", [(1, ["left"]), (0, ["left", "right"])])
def test_predict_with_too_few_or_too_many_columns(tmp_path, refused, saved, model, columns):
    """A model of pairs needs both texts; a model of single texts takes one."""
    path = tmp_path / "pairs.tsv"
    path.write_bytes(as_file("tsv", ("left", "right"), [("film", "plot"), ("cast", "music")]))
    message = refused("05_acl_cl", "--load", str(saved[model]), "--predict", str(path), "--columns", *columns)
    assert "--columns" in message


def test_predict_into_a_file(tmp_path, script, saved):
    """--out_file is given what stdout would be, makes its folder, replaces what was there; stdout stays empty."""
    path, out = tmp_path / "texts.csv", tmp_path / "new" / "folder" / "out.tsv"
    path.write_bytes(as_file("csv", ("sentence", "id"), [(text, 0) for text in TO_PREDICT]))
    load = ["--load", str(saved[0]), "--predict", str(path)]
    wanted = script("05_acl_cl", *load).out
    for _ in range(2):
        assert script("05_acl_cl", *load, "--out_file", str(out)).out == ""
        assert out.read_bytes().decode() == wanted
        out.write_text("something else")
    assert [file.name for file in out.parent.iterdir()] == ["out.tsv"]


@pytest.mark.parametrize("out", ["/proc/out.tsv", "{tmp}/file/out.tsv", "{tmp}/file/below/out.tsv", "{tmp}/folder"])
def test_predict_where_nothing_can_be_written(tmp_path, refused, saved, out):
    """A folder that takes no file, a file in the place of a folder, a folder in the place of the file."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "texts.tsv").write_text("sentence\nfilm\n")
    out = out.replace("{tmp}", str(tmp_path))
    assert out in refused("05_acl_cl", "--load", str(saved[0]), "--predict", str(tmp_path / "texts.tsv"),
                          "--out_file", out)
    assert (tmp_path / "file").read_text() == "text" and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("name, content, parts", [
    ("absent.tsv", None, ["No such file"]), ("texts.tsv", {}, ["directory"]),
    ("texts.csv", "", ["empty file", "sentence"]), ("texts.csv", "sentence\n", ["no examples"]),
    ("texts.csv", "text\nfilm\n", ["line 1", "text", "sentence"]),
    ("texts.tsv", b"sentence\nfilm\nna\xefve\n", ["line 3", "0xef", "UTF-8"]),
    ("texts.csv", 'sentence\n"film\n', ["line 2", "CSV"]),
    ("texts.csv", "sentence,sentence\na,b\n", ["sentence twice"]),
    ("texts.jsonl", '{"sentence": "film"}\n{"sentence": null}\n', ["line 2", "None", "expected text"]),
    ("texts.jsonl", '{"sentence": "film"}\n{"sentence": "\\ud800"}\n', ["line 2", "\\ud800", "expected text"]),
    ("texts.jsonl", '{"sentence": "film"}\n[]\n', ["line 2", "[]", "JSON object"])])
def test_predict_on_a_wrong_file(tmp_path, refused, saved, name, content, parts):
    write_folder(tmp_path, {name: content})
    message = refused("05_acl_cl", "--load", str(saved[0]), "--predict", str(tmp_path / name))
    assert all(part in message for part in [str(tmp_path / name), *parts]), message


@pytest.mark.parametrize("threshold", ["0", "1.5", "6", "100"])
def test_patience_fits_the_model(tmp_path, refused, saved, threshold):
    """A whole number, at least 1 and below the number of exits: a larger one would never let anybody leave."""
    message = refused("05_acl_cl", "--load", str(saved[0]), "--predict", str(tmp_path / "texts.tsv"),
                      "--policy", "patience", "--threshold", threshold)
    assert all(part in message for part in ("--threshold", f"found {threshold}", "whole number from 1 to 5")), message


def test_predict_neither_overwrites_nor_guesses(tmp_path, refused, saved):
    """The input isn't taken for the output, and an unknown ending isn't read as one of the three formats."""
    for name, more, part in (("a.csv", ["--out_file", "{}"], "found the file to predict on"), ("a.txt", [], "'.txt'"),
                             ("a.CSV", [], "'.CSV'"), ("a", [], "no ending")):
        path = tmp_path / name
        path.write_text("sentence\nfilm\n")
        message = refused("05_acl_cl", "--load", str(saved[0]), "--predict", str(path),
                          *(flag.format(path) for flag in more))
        assert part.strip("'") in message and path.read_text() == "sentence\nfilm\n", message


def test_predict_notes_go_to_stderr(tmp_path, script, saved):
    """What a program reads from stdout is labels alone."""
    (tmp_path / "texts.tsv").write_text("sentence\n" + "zebra\n" * 3 + "film " * 50 + "\n")
    said = script("05_acl_cl", "--load", str(saved[0]), "--predict", str(tmp_path / "texts.tsv"))
    assert len(said.out.splitlines()) == 4 and "note" not in said.out
    assert "25.0 % of the examples are longer than 40" in said.err and "tokens are unknown" in said.err


def test_from_training_to_labels(tmp_path, monkeypatch, script):
    """Train on a folder, save, load, label dev's texts: with nobody leaving early, the accuracy is the saved one."""
    monkeypatch.setattr(common, "POLICIES", {"entropy": (0.4,), "patience": (1,), "confidence": (0.8,)})
    examples = toy_examples(60, 20)
    train, dev = ([(example.sentence1, 10 if example.label else 9) for example in split] for split in examples)
    folder = write_task(tmp_path / "own", "csv", [*train, ("film", 100)], dev, ("review", "stars"))
    own = ["--task", str(folder), "--columns", "review", "stars"]
    script("05_acl_cl", *own, "--model", "tiny", "--seeds", "0", "--epochs", "1", "--lr", "0.01",
           "--save", str(tmp_path / "model"))
    settings_ = json.loads((tmp_path / "model" / "settings.json").read_text())
    assert settings_["label_names"] == ["9", "10", "100"] and settings_["columns"] == ["review"]
    said = script("05_acl_cl", "--load", str(tmp_path / "model"), *own).out
    assert all(" ".join(f"{score:.1f}" for score in settings_["scores"]) in line
               for line in said.splitlines() if "saved: dev" in line or "loaded: dev" in line)
    lines = script("05_acl_cl", "--load", str(tmp_path / "model"), "--predict", str(folder / "dev.csv"),
                   "--threshold", "0").out.splitlines()
    hits = sum(line.split("\t")[0] == str(label) for line, (_, label) in zip(lines, dev))
    assert len(lines) == 20 and 100 * hits / 20 == pytest.approx(settings_["scores"][-1])


# -------------------------------------------------------------------------------------------------------- fuzz

FUZZ_ROWS = [("the plot was dull", "0"), ('so "fine", he said', "1"), ("café \N{SNOWMAN} films", "1"), ("", "0"),
             ("a\u2028b", "1"), ("music, cast", "0"), ("'", "1")]


def cut(rng, data):
    return data[:rng.randrange(len(data))]


def double_line(rng, data):
    lines = data.splitlines(keepends=True)
    i = rng.randrange(len(lines))
    return b"".join(lines[:i + 1] + lines[i:])


def delete_line(rng, data):
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def change_bytes(rng, data):
    """One to four bytes put in, replaced or taken out; half of them such as have a meaning in the formats."""
    for _ in range(rng.randint(1, 4)):
        i = rng.randrange(len(data) + 1)
        byte = bytes([rng.choice(b'\t\r\n\n",,{}\\\x00\x0b\x85 01') if rng.random() < 0.5 else rng.randrange(256)])
        data = data[:i] + rng.choice([b"", byte, byte]) + data[i + rng.randint(0, 1):]
    return data


def windows_line_ends(rng, data):
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def blank_lines_at_the_end(rng, data):
    return data + rng.choice([b"\n", b"\r\n"]) * rng.randint(1, 5)


MUTATIONS = (cut, double_line, delete_line, change_bytes, change_bytes, windows_line_ends, blank_lines_at_the_end)
HARMLESS = (windows_line_ends, blank_lines_at_the_end)


def read_independently(path, suffix):
    """Another reading of the file, as dicts of text and label. Raises ValueError or csv.Error where there is none."""
    data = path.read_bytes()
    if suffix == "csv":
        with open(path, newline="", encoding="utf-8-sig") as file:
            names, *rows = csv.reader(file, strict=True)
        while rows and not rows[-1]:
            rows.pop()
        return [dict(zip(names, row, strict=True)) for row in rows]
    data = data.removeprefix(b"\xef\xbb\xbf")
    while data[-1:] in (b"\r", b"\n"):
        data = data[:-1]
    if suffix == "tsv":
        names, *rows = [[field.decode() for field in line.removesuffix(b"\r").split(b"\t")]
                        for line in data.split(b"\n")]
        return [dict(zip(names, row, strict=True)) for row in rows]
    return [dict(json.loads(line.decode())) for line in data.split(b"\n")]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_mutated_files(tmp_path, suffix):
    """200 damaged files: one sentence naming the file, or every example of an independent reading, text by text."""
    outcomes = []
    for seed in range(200):
        rng = random.Random(seed)
        columns = rng.sample(["sentence", "label", "id"], 3)                    # in any order
        rows = [tuple({"sentence": text, "label": label, "id": str(i)}[name] for name in columns)
                for i, (text, label) in enumerate(FUZZ_ROWS + [("two\nlines", "1")] * (suffix == "csv"))]
        folder = write_task(tmp_path / str(seed), suffix, rows, rows[:3], columns)
        mutate, path = MUTATIONS[seed % len(MUTATIONS)], folder / f"train.{suffix}"
        path.write_bytes(mutate(rng, path.read_bytes()))
        try:
            task = load_task(str(folder))
        except InputError as error:
            message = str(error)
            assert mutate not in HARMLESS, (seed, message)
            assert len(message.splitlines()) == 1, (seed, message)
            assert message.startswith((str(path), f"{folder}/dev.{suffix} line ", f"--task {folder}: found only ")), (
                seed, message)
            outcomes.append("refused")
            continue
        wanted = read_independently(path, suffix)
        assert len(task.train) == len(wanted), (seed, path.read_bytes())
        assert named(task, task.train) == [(row["sentence"], str(row["label"]).strip()) for row in wanted], seed
        assert len(task.dev) == 3
        outcomes.append("read")
    assert min(outcomes.count("refused"), outcomes.count("read")) > 40
