"""Tasks, tokenising, batches: as many examples as lines, text intact, one clear sentence where a line is wrong."""

import json

import numpy as np
import pytest
import torch

from common import (TASKS, TOY_BAD, TOY_GOOD, Example, InputError, encode, epoch_batches, load_backbone, load_task,
                    make_batch, read_glue, toy_examples, toy_tokenizer)

SST2, MRPC, COLA, RTE = (TASKS[name] for name in ("sst2", "mrpc", "cola", "rte"))
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def write(folder, text, name="train.tsv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


def test_quotes_are_text(tmp_path):
    """A field that starts with a quote, the next quote three lines on: a CSV reader would fold them into one."""
    path = write(tmp_path, 'sentence\tlabel\n"one\t0\ntwo\t1\nthree" he said\t0\n')
    assert [example.sentence1 for example in read_glue(path, SST2)] == ['"one', "two", 'three" he said']


def test_byte_order_mark(tmp_path):
    path = write(tmp_path, ("\ufeff" + MRPC_HEADER + "\r\n1\t7\t8\ta b\tc d\r\n").encode("utf-8"))
    assert read_glue(path, MRPC) == [("a b", "c d", 1)]


def test_cola_has_no_header(tmp_path):
    """The first line is data, the last may lack its line end, and an empty sentence is a sentence."""
    path = write(tmp_path, "gj04\t1\t\tFirst.\ngj04\t0\t*\t\ngj04\t1\t\tLast.")
    assert read_glue(path, COLA) == [("First.", None, 1), ("", None, 0), ("Last.", None, 1)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_stays_as_it_is(tmp_path, end):
    """Words that some readers take for missing values, an empty sentence, and characters that splitlines() cuts at."""
    texts = ["null", "NA", "NaN", "", " ", "None", "a\u2028b", "a\x85b\x0bc\x1cd", "\N{SNOWMAN} \N{GRINNING FACE}", "'"]
    path = write(tmp_path, end.join(["sentence\tlabel", *(f"{text}\t1" for text in texts)]) + end)
    assert [example.sentence1 for example in read_glue(path, SST2)] == texts


@pytest.mark.parametrize("text, task, parts", [
    ("sentence\tlabel\nfine\t0\nno label\n", SST2, ["line 3", "found 1", "expected 2"]),
    ("sentence\tlabel\nfine\t0\none\ttwo\t0\n", SST2, ["line 3", "found 3", "expected 2"]),
    ("sentence\tlabel\nfine\t0\n\nfine\t1\n", SST2, ["line 3", "found 1"]),
    ("sentence\tlabel\nfine\t2\n", SST2, ["line 2", "'2'", "negative, positive"]),
    ("sentence\tlabel\nfine\t-1\n", SST2, ["line 2", "-1", "without labels"]),
    ("index\tsentence1\tsentence2\n0\ta\tb\n", RTE, ["line 1", "label", "without labels"]),
    ("index\tsentence1\tlabel\n0\ta\tentailment\n", RTE, ["line 1", "sentence2"]),
    ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", RTE, ["line 2", "'maybe'", "entailment, not_entailment"]),
    ("gj04\t1\t\tfine\ngj04\t1\tfine\n", COLA, ["line 2", "found 3", "expected 4"]),
    ("sentence\tlabel\n", SST2, ["no examples"]),
    ("", SST2, ["empty file", "sentence, label"]),
    (b"sentence\tlabel\nfine\t0\nna\xefve\t1\n", SST2, ["line 3", "0xef", "UTF-8"]),
])
def test_a_wrong_line_is_named(tmp_path, text, task, parts):
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        read_glue(path, task)
    assert all(part in str(error.value) for part in [str(path), *parts]), error.value


def test_missing_file_or_folder_in_its_place(tmp_path):
    with pytest.raises(InputError, match="RTE"):
        load_task("rte", tmp_path)
    (tmp_path / "RTE" / "train.tsv").mkdir(parents=True)
    with pytest.raises(InputError, match="train.tsv"):
        load_task("rte", tmp_path)


def test_labels_are_the_hubs_ids():
    """The ids of the hub's nyu-mll/glue, in order."""
    assert TASKS["mnli"].label_names == ("entailment", "neutral", "contradiction")
    assert TASKS["rte"].label_names == TASKS["qnli"].label_names == ("entailment", "not_entailment")
    assert TASKS["cola"].label_names[1] == "acceptable" and TASKS["sst2"].label_names[1] == "positive"
    assert TASKS["mrpc"].label_names[1] == "equivalent" and TASKS["qqp"].label_names[1] == "duplicate"


def test_mnli_from_files(tmp_path):
    """train and dev have different columns, the mismatched half may be absent."""
    folder = tmp_path / "MNLI"
    folder.mkdir()
    write(folder, "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tneutral\n"
          "1\tc\td\tentailment\tentailment\n")
    dev = "index\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n0\ta\tb\tneutral\tneutral\tcontradiction\n"
    write(folder, dev, "dev_matched.tsv")
    assert load_task("mnli", tmp_path).dev_mismatched is None
    write(folder, dev + "1\tc\td\tneutral\tneutral\tentailment\n", "dev_mismatched.tsv")
    task = load_task("mnli", tmp_path)
    assert task.num_labels == 3 and task.train[0].label == 1
    assert [example.label for example in task.dev_mismatched] == [2, 0]


@pytest.mark.parametrize("name, train, dev", [
    ("rte", 2490, 277), ("mrpc", 3667, 408), ("cola", 8551, 1043), ("sst2", 67349, 872), ("qnli", 160, 5463),
    ("qqp", 160, 160), ("mnli", 240, 240)])
def test_real_files(glue_dir, name, train, dev):
    task = load_task(name, glue_dir)
    assert (len(task.train), len(task.dev)) == (train, dev)
    assert {example.label for example in task.train} == set(range(task.num_labels))
    assert len(load_task(name, glue_dir, limit=50).train) == 50


def test_toy():
    """Seeded, balanced, no sentence in both splits, a tenth of the train labels flipped and none in dev."""
    train, dev = toy_examples()
    assert (train, dev) == toy_examples()
    assert (len(train), len(dev)) == (3200, 800)
    assert not {example.sentence1 for example in train} & {example.sentence1 for example in dev}
    assert 0.45 < np.mean([example.label for example in train + dev]) < 0.55
    clean, _ = toy_examples(noise=0)
    assert [example.sentence1 for example in clean] == [example.sentence1 for example in train]
    assert 0.08 < np.mean([a.label != b.label for a, b in zip(clean, train)]) < 0.12
    tokenizer = toy_tokenizer()
    assert tokenizer.unk_token_id not in sum(tokenizer([example.sentence1 for example in train + dev])["input_ids"], [])


def test_toy_labels_by_hand():
    """The label of each tier by an independent rule: polarity of the clause that decides."""
    for example in toy_examples(noise=0)[0]:
        text = example.sentence1
        deciding = text.split(" but ")[1] if " but " in text else text.split(" although ")[0]
        words = deciding.split()
        polarity = sum(word in TOY_GOOD for word in words) - sum(word in TOY_BAD for word in words)
        flips = sum(word in ("not", "never", "doubt") for word in words)
        assert example.label == (polarity * (-1) ** flips == 1), text


def test_pairs_truncation_and_padding():
    """A pair is one input with two segments; the longer sentence is cut first; padding is on the right."""
    tokenizer, _ = load_backbone("tiny")
    examples = [Example("the " * 30, "film was great", 1), Example("the film", "dull", 0)]
    split = encode(tokenizer, examples, max_length=16)
    assert list(split.lengths) == [16, 6]
    assert split.inputs["input_ids"][0].tolist().count(tokenizer.sep_token_id) == 2
    assert split.inputs["token_type_ids"][0][-4:].tolist() == [1, 1, 1, 1]
    inputs, y = make_batch(split, np.array([1, 0]), "cpu")
    assert inputs["input_ids"].shape == (2, 16) and y.tolist() == [0, 1]
    assert inputs["attention_mask"][0].tolist() == [1] * 6 + [0] * 10
    assert (inputs["input_ids"][0, 6:] == tokenizer.pad_token_id).all()


def test_epoch_order_depends_on_seed_and_epoch_only():
    split = encode(toy_tokenizer(), toy_examples(num_train=300, num_dev=1)[0], 128)

    def rows(seed, epoch):
        return [micro.tolist() for batch in epoch_batches(split, 40, seed, epoch) for micro in batch]
    np.random.rand(7)
    assert rows(0, 3) == rows(0, 3)
    assert rows(0, 3) != rows(0, 4) and rows(0, 3) != rows(1, 3) and rows(0, 1) != rows(1, 0)
    assert sorted(sum(rows(0, 3), [])) == list(range(300))
    assert all(len(micro) <= 32 for micro in rows(0, 3))


def test_roberta(roberta_dir):
    """Half precision on disk, float32 in memory; no pooler, no token types, its own pad id; layers can be cut."""
    tokenizer, backbone = load_backbone(str(roberta_dir))
    assert {parameter.dtype for parameter in backbone.parameters()} == {torch.float32}
    assert backbone.pooler is None and len(backbone.encoder.layer) == 3
    split = encode(tokenizer, toy_examples(num_train=8, num_dev=1)[0], 40)
    assert set(split.inputs) == {"input_ids", "attention_mask"} and split.padding["input_ids"] == 1
    assert len(load_backbone(str(roberta_dir), num_layers=2)[1].encoder.layer) == 2


def test_models_that_are_none(roberta_dir, tmp_path):
    """An empty folder, a path that isn't there, another family, a checkpoint with a weight missing."""
    from safetensors.torch import load_file, save_file
    with pytest.raises(InputError, match="--model"):
        load_backbone(str(tmp_path))
    with pytest.raises(InputError, match="no such directory"):
        load_backbone(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match="found a model of type gpt2, expected bert or roberta"):
        load_backbone(str(tmp_path))
    for file in roberta_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(roberta_dir / "model.safetensors")
    weights.pop(next(name for name in weights if "layer.1" in name))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 weights"):
        load_backbone(str(tmp_path))
