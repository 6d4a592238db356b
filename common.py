"""What every script needs and no script teaches.

  1  Settings       flags, defaults, device and precision
  2  Tasks          GLUE from files or from the hub, or a folder of one's own
  3  Toy task       generated film reviews, for runs without network
  4  Batches        tokenising, length-bucketed batches, padding
  5  Models         backbone, MHA exit, linear exit
  6  Losses         supervised contrastive loss, distillation loss
  7  Gradients      per-loss gradients, their angle, their weighted sum
  8  Optimisation   AdamW, warm-up and decay, one update
  9  Evaluation     hidden states of a split, predictions, GLUE scores
 10  Early exit     layer by layer, samples leave when they are sure; saving and loading
 11  Runs           records, checkpoints, the share of one process among several
 12  Reports        tables and figures of the records

Letters: N batch size, K classes, L tokens, M layers (and exits), d backbone width, d_e exit width.
"""

import argparse
import contextlib
import csv
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import datasets
import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

# ---------------------------------------------------------------- 1 Settings

# The paper's (§5.3), where the batch size follows the size of the task; and ours for the toy.
GLUE_DEFAULTS = {"model": "bert-base-uncased", "seeds": [0, 1, 2, 3, 4], "epochs": 15, "lr": 2e-5, "batch_size": None}
VERSIONS = {module.__name__: module.__version__ for module in (torch, transformers, datasets, np)}
TOY_DEFAULTS = {"model": "tiny", "seeds": [0], "epochs": 4, "lr": 1.5e-3, "batch_size": 32}


def first_line(error):
    """First line of an exception's message, or its type where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


class InputError(ValueError):
    """A mistake the user can mend. `run` prints it as one sentence and exits with code 2."""


def run(main):
    """Calls `main`; an InputError becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    So does running out of device memory. With --debug both keep their stack trace, as all other errors always do.
    """
    try:
        main()
        sys.stdout.flush()
    except (InputError, torch.OutOfMemoryError) as error:
        if "--debug" in sys.argv:
            raise
        hint = "" if isinstance(error, InputError) else " Try a smaller --max_length, or a --batch_size under 32."
        tqdm.write(f"error: {first_line(error)}{hint}", file=sys.stderr)        # below the progress bar, not behind it
        sys.exit(2)
    except KeyboardInterrupt:
        tqdm.write("interrupted: the same command, without --fresh, goes on after the last whole epoch",
                   file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:                     # as in "… | head": whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def number(kind, low=-math.inf, high=math.inf, above=-math.inf):
    """An argparse type: a number of `kind` with low ≤ number ≤ high and number > above."""
    limits = [f"{sign} {limit:g}" for sign, limit in (("≥", low), ("≤", high), (">", above)) if math.isfinite(limit)]

    def convert(text):
        try:
            value = kind(text)
            fits = low <= value <= high and value > above and math.isfinite(value)
        except (ValueError, OverflowError):
            fits = False
        if not fits:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {kind.__name__} {' and '.join(limits)}")
        return value

    return convert


def shared_flags(description):
    """The flags that all scripts have. A script adds its own, then calls `parse`."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,      # --angle isn't --angle_every
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", default="toy", help=f"toy (default), {', '.join(TASKS)}, or a folder with train and dev files")
    add("--data_dir", help="folder of the official GLUE download; without it GLUE comes from the hub")
    add("--columns", nargs="+", metavar="NAME",
        help="of a folder's files: one or two text columns, then the label column (default: sentence label, or "
             "sentence1 sentence2 label)")
    add("--model", help="tiny (toy's default), a hub name (GLUE's default: bert-base-uncased) or a directory")
    add("--max_length", type=number(int, 8), default=128, help="tokens per example, pairs included (default 128)")
    add("--limit", type=number(int, 1), help="train on the first n examples only")
    add("--seeds", type=number(int, 0, 2 ** 32 - 1), nargs="+", help="one run per seed (toy 0, GLUE 0 1 2 3 4)")
    add("--epochs", type=number(int, 1), help="passes over the training data (toy 4, GLUE 15)")
    add("--lr", type=number(float, above=0), help="peak learning rate (toy 1.5e-3, GLUE 2e-5)")
    add("--batch_size", type=number(int, 1),
        help="examples per update (toy 32, GLUE max(8, round(training examples / 200)))")
    add("--device", help="cuda, mps or cpu (default: the first of these that is there)")
    add("--precision", choices=["auto", "fp32", "bf16"], default="auto",
        help="auto: bf16 autocast where the device computes in it natively, else fp32")
    add("--out", default="runs", help="folder for records, checkpoints and figures (default runs)")
    add("--fresh", action="store_true", help="train anew what is finished or was stopped (default: go on)")
    add("--debug", action="store_true", help="a stack trace with the errors that are one sentence")
    return parser


def contrast_flags(parser):
    """The flags of the scripts with a contrastive term."""
    add = parser.add_argument
    add("--lam", type=number(float, 0, 1), default=0.02, help="λ, weight of the contrastive term (default 0.02)")
    add("--tau", type=number(float, above=0), default=0.5, help="τ, temperature of the contrastive term (default 0.5)")


def stage_two_flags(parser):
    """The flags of the scripts that train exits 1 … M−1 on a frozen backbone."""
    add = parser.add_argument
    add("--exit_lr", type=number(float, above=0), nargs="+",
        help="peak learning rate of stage two (default: --lr); several: stage two once with each")
    add("--exit_epochs", type=number(int, 1), help="epochs of stage two (default: --epochs)")
    add("--exit_seeds", type=number(int, 1), default=1,
        help="repeat stage two with seeds 0 … n−1 on each stage one (default 1)")
    add("--cache_gb", type=number(float, 0),
        help="memory for the frozen hidden states (default: a third of what is free); 0: run the backbone every epoch")


def load_flags(parser):
    """The flags for what is done with a saved model."""
    add = parser.add_argument
    add("--load", metavar="DIR", help="instead: load such a model and try early exit on it")
    add("--predict", metavar="FILE", help="with --load: label the texts of a .csv, .tsv or .jsonl file")
    add("--out_file", metavar="FILE", help="where --predict writes label, probability and exit layer (standard output)")
    add("--policy", choices=list(POLICIES), help="when a text leaves under --predict (entropy)")
    add("--threshold", type=number(float, 0), help="of --policy: entropy (0.2), patience (2), confidence (0.9)")


def parse(parser):
    """Parses the command line, fills in what depends on the task, resolves device and precision."""
    args = parser.parse_args()
    for name, value in (TOY_DEFAULTS if args.task == "toy" else GLUE_DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if "exit_lr" in args:
        args.exit_lr, args.exit_epochs = args.exit_lr or [args.lr], args.exit_epochs or args.epochs
    for name in ("seeds", "exit_lr", "lams", "columns"):
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in getattr(args, name, None) or []]
        if len(set(values)) < len(values):      # as they are in the names of records
            parser.error(f"argument --{name}: found {' '.join(values)}, expected distinct values")
    if "predict" in args:
        if args.predict and not args.load:
            parser.error("argument --predict: expected --load with it, the folder of a saved model")
        for name in ("out_file", "policy", "threshold"):
            if getattr(args, name) is not None and not args.predict:
                parser.error(f"argument --{name}: expected --predict with it")
        args.policy = args.policy or "entropy"
        if args.threshold is None:
            args.threshold = {"entropy": 0.2, "patience": 2, "confidence": 0.9}[args.policy]
        elif args.threshold > 1 and args.policy != "patience":
            parser.error(f"argument --threshold: found {args.threshold:g}, expected 0 … 1 with --policy {args.policy}")
    if args.task not in ("toy", *TASKS) and not Path(args.task).is_dir():
        parser.error(f"argument --task: found {args.task!r}, expected toy, {', '.join(TASKS)}, or a folder with train "
                     "and dev files")
    if args.model == "tiny" and args.task in TASKS:
        parser.error(f"argument --model: tiny only knows the words of --task toy, found --task {args.task}")
    if args.data_dir and args.task not in TASKS:
        parser.error(f"argument --data_dir: belongs to GLUE tasks, found --task {args.task}")
    if args.columns:
        predicting = bool(getattr(args, "predict", None))       # needs no label column
        if len(args.columns) not in ((1, 2) if predicting else (2, 3)):
            parser.error(f"argument --columns: found {' '.join(args.columns)}, expected one or two text columns"
                         + ", then the label column" * (not predicting))
        if args.task in ("toy", *TASKS) and not predicting:
            parser.error(f"argument --columns: belongs to --task path/to/folder, found --task {args.task}")
    # torchrun sets these, and a Slurm script can: which process this is, of how many, and where on its machine.
    args.rank, args.world_size, local = (environment_number(*each) for each in (
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if args.rank >= args.world_size:
        parser.error(f"environment variable RANK: found {args.rank}, expected less than WORLD_SIZE={args.world_size}")
    fallback = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        args.device = torch.device(args.device or fallback)
        if args.device.type not in ("cuda", "mps", "cpu"):
            raise RuntimeError("expected cuda, mps or cpu")
        if args.device == torch.device("cuda") and args.world_size > 1:
            args.device = torch.device("cuda", local % torch.cuda.device_count())
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"argument --device: {args.device} can't be used here: {first_line(error)}")
    if args.precision == "auto":
        args.precision = "bf16" if has_native_bf16(args.device) else "fp32"
    return args


def environment_number(name, default):
    """An environment variable that counts something. → int"""
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise InputError(f"environment variable {name}: found {text!r}, expected a number")
    return int(text)


def has_native_bf16(device):
    """True where bf16 is a gain, not an emulation: CUDA from Ampere on, CPUs with AVX512-BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return False


# ------------------------------------------------------------------- 2 Tasks

class Example(NamedTuple):
    sentence1: str
    sentence2: str | None       # None: a task about single sentences
    label: int                  # 0 … K−1


class Task(NamedTuple):
    folder: str                 # in the official GLUE download
    columns: tuple              # text columns in the files
    label: str                  # label column in the files
    hub_columns: tuple          # text columns on the hub, where the label column is "label"
    label_names: tuple          # in the order of the ids, the same from files and from the hub
    metric: str                 # what "score" is, see `glue_scores`
    header: tuple = ()          # column names, where the files have no header line


SENTENCES = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", ("sentence",), ("unacceptable", "acceptable"), "matthews",
                 header=("source", "label", "mark", "sentence")),
    "sst2": Task("SST-2", ("sentence",), "label", ("sentence",), ("negative", "positive"), "accuracy"),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality", SENTENCES,
                 ("not_equivalent", "equivalent"), "accuracy_f1"),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", ("question1", "question2"),
                ("not_duplicate", "duplicate"), "accuracy_f1"),
    "mnli": Task("MNLI", SENTENCES, "gold_label", ("premise", "hypothesis"),
                 ("entailment", "neutral", "contradiction"), "accuracy"),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ("question", "sentence"), ENTAILMENT, "accuracy"),
    "rte": Task("RTE", SENTENCES, "label", SENTENCES, ENTAILMENT, "accuracy"),
}


class TaskData(NamedTuple):
    """A task: lists of Example as `load_task` reads them, a Split in place of each list once it is tokenised."""
    train: list
    dev: list
    label_names: tuple
    columns: tuple                          # text columns, as a file to predict on is to name them
    dev_mismatched: list | None = None      # MNLI's second dev set; None for every other task

    @property
    def num_labels(self):
        """K, the number of classes."""
        return len(self.label_names)

    @property
    def splits(self):
        """The splits that the task has, by their names. → dict"""
        return {name: split for name in ("train", "dev", "dev_mismatched") if (split := getattr(self, name))}


def load_task(name, data_dir=None, limit=None, columns=None):
    """Loads a task as lists of examples: .train, .dev, .label_names, .num_labels, for MNLI also .dev_mismatched.

    name      "toy", a key of TASKS, or a folder with train and dev files, see `load_folder`
    data_dir  folder of the official GLUE download; None: the hub's "nyu-mll/glue". For keys of TASKS only.
    limit     keep only the first n training examples
    columns   names of a folder's text columns and label column; None: the usual ones
    Raises InputError where a file or a line isn't what it should be, the hub can't be reached, or the training
    examples are all of one class.
    """
    if name == "toy":
        train, dev = toy_examples()
        data = TaskData(train, dev, ("negative", "positive"), ("sentence",))
    elif name in TASKS:
        data = load_glue(name, data_dir)
    else:
        data = load_folder(Path(name), columns)
    data = data._replace(train=data.train[:limit])
    labels = {example.label for example in data.train}
    if len(labels) < 2:
        raise InputError(f"{f'--limit {limit}' if limit else f'--task {name}'}: found only "
                         f"{data.label_names[labels.pop()]} among the {len(data.train)} training examples, "
                         "expected two classes or more")
    return data


def load_glue(name, data_dir):
    """Loads a GLUE task, from the files of the official download or from the hub. → TaskData"""
    task = TASKS[name]
    dev, mismatched = ("dev_matched", "dev_mismatched") if name == "mnli" else ("dev", None)
    if data_dir is not None:
        folder = Path(data_dir) / task.folder
        splits = [read_glue(folder / f"{split}.tsv", task) for split in ("train", dev)]
        if mismatched and (folder / f"{mismatched}.tsv").exists():
            splits.append(read_glue(folder / f"{mismatched}.tsv", task))
    else:
        glue = load_from_hub(f"--task {name}", lambda: datasets.load_dataset("nyu-mll/glue", name))
        splits = [read_hub_split(glue[split.replace("dev", "validation")], task, f"nyu-mll/glue {name} {split}")
                  for split in ("train", dev, mismatched) if split]
    return TaskData(*splits[:2], task.label_names, TEXT_COLUMNS[len(task.columns) - 1], *splits[2:])


def read_glue(path, task):
    """Reads one file of the official GLUE download. → list of Example"""
    _, rows = read_table(path, [task.columns], task.label, task.header,
                         hint=f"; --data_dir expects the official GLUE download's layout, here "
                              f"{task.folder}/{Path(path).name}")
    return [make_example(texts, label, task, f"{path} line {number}") for number, (*texts, label) in rows]


def load_folder(folder, columns=None):
    """Loads a task of the user's own: files train and dev (or validation), each .csv, .tsv or .jsonl. → TaskData

    The labels are whatever stands in train's label column, in order: of size if all are integers, else of the
    alphabet. Raises InputError where dev has a label that train lacks, or the labels look like measurements: over 20
    decimal numbers, or over 100 labels on less than two lines each.
    """
    *texts, label = columns or [None, "label"]
    choices = [tuple(texts)] if columns else TEXT_COLUMNS[::-1]
    tables = {}
    for split, names in (("train", ["train"]), ("dev", ["dev", "validation"])):
        paths = [folder / (name + suffix) for name in names for suffix in READERS]
        found = [path for path in paths if path.exists()]
        if len(found) != 1:
            raise InputError(f"--task {folder}: found {' and '.join(path.name for path in found) or 'no file'} for the "
                             f"{split} split, expected one of {', '.join(path.name for path in paths)}")
        texts, tables[found[0]] = read_table(found[0], choices, label)
        choices = [texts]                                       # dev is to have the columns that train has

    train_path, train = next(iter(tables.items()))
    counts = Counter(as_label(row[-1], f"{train_path} line {number}") for number, row in train)
    whole, decimal = (all(re.fullmatch(pattern, name) for name in counts)
                      for pattern in (r"-?[0-9]{1,18}", r"-?[0-9]*\.?[0-9]+"))
    names = tuple(sorted(counts, key=lambda name: (int(name), name) if whole else name))
    if len(names) > (20 if decimal and not whole else max(100, len(train) // 2)):
        raise InputError(f"{train_path}: found {len(names):,} different labels on {len(train):,} lines in column "
                         f"{label}, {shortened(names, 3)}, expected classes")
    index, splits = {name: k for k, name in enumerate(names)}, []
    for path, rows in tables.items():
        splits.append([])
        for number, values in rows:
            where = f"{path} line {number}"
            found = as_label(values[-1], where)
            if found not in index:
                raise InputError(f"{where}: found label {shortened([repr(found)])}, which {train_path.name} lacks, "
                                 f"expected one of {shortened(names)}")
            splits[-1].append(own_example(texts, values[:-1], index[found], where))
    return TaskData(*splits, names, tuple(texts))


def as_label(value, where):
    """A label as text: what stands in the file, or an integer from JSON. → str"""
    label = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not label or not label.isprintable():
        raise InputError(f"{where}: found label {shortened([repr(value)])}, expected a word or an integer")
    return label


def own_example(columns, texts, label, where):
    """An Example of one or two texts. JSON can hold other things in their place, and half characters."""
    for column, text in zip(columns, texts):
        if not isinstance(text, str) or not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise InputError(f"{where}: found {shortened([repr(text)])} as {column}, expected text")
    return Example(texts[0], texts[1] if len(texts) == 2 else None, label)


def shortened(names, most=10):
    """The first names, the first sixty characters of each, in one line with commas between them. → str"""
    shown = [name if name.isprintable() else repr(name) for name in map(str, names[:most])]
    shown = [name if len(name) <= 60 else name[:60] + "…" for name in shown]
    return ", ".join(shown) + (f", … ({len(names)} in all)" if len(names) > most else "")


def read_table(path, choices, label=None, header=None, hint=""):
    """Reads text columns, and the column `label` after them, of a .csv, .jsonl or, with any other ending, .tsv file.

    choices: tuples of text columns; the first of which the file has all is read. header: the columns of a file that
    doesn't begin with them. hint: for the message, where the file can't be opened.
    → the chosen text columns, list of (line number, values). Raises InputError naming file and line.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")            # -sig: MRPC's files open with a byte-order mark
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        found = f"0x{error.object[error.start]:02x}"
        raise InputError(f"{path} line {number}: found byte {found}, expected UTF-8 text") from None
    text, last = text.rstrip("\r\n"), [label] if label else []
    expected = " or ".join(", ".join([*each, *last]) for each in choices)
    if not text:
        raise InputError(f"{path}: found an empty file, expected columns {expected}")
    lines = READERS.get(path.suffix, tsv_lines)(text)
    try:
        names = header or next(lines)[1]
        texts = next((each for each in choices if set(each) <= set(names)), None)
        if texts is None or label and label not in names:
            hint = "; a split without labels can't be trained on or scored" if texts else ""
            raise ValueError(f"line 1: found columns {shortened(names)}, expected {expected} among them{hint}")
        columns = [*texts, *last]
        if doubled := [column for column in columns if names.count(column) > 1]:
            raise ValueError(f"line 1: found column {doubled[0]} twice, expected it once")
        at, rows = [names.index(column) for column in columns], []
        for number, fields in lines:
            if len(fields) != len(names):
                raise ValueError(f"line {number}: found {len(fields)} fields, expected {len(names)}, the columns "
                                 f"{shortened(names)}")
            rows.append((number, [fields[i] for i in at]))
    except ValueError as error:
        raise InputError(f"{path} {error}") from None
    if not rows:
        raise InputError(f"{path}: found no examples, expected at least one line of data")
    return texts, rows


def tsv_lines(text):
    """Lines of fields parted by tabs, without any quoting: in GLUE's files a quotation mark is text."""
    for number, line in enumerate(text.split("\n"), start=1):   # splitlines() would also cut at U+2028 and the like
        yield number, line.removesuffix("\r").split("\t")


def csv_lines(text):
    """CSV, whose quoted fields may hold commas, line ends and doubled quotation marks."""
    csv.field_size_limit(2 ** 31 - 1)                           # the default refuses over 131,072 characters
    reader, number = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    try:
        for fields in reader:
            yield number, fields
            number = reader.line_num + 1                        # where the next one starts
    except csv.Error as error:
        raise ValueError(f"line {number}: found {error}, expected CSV with its quotation marks in pairs") from None


def jsonl_lines(text):
    """A JSON object a line. The keys of the first are the columns; what another lacks of them is None."""
    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)

    names = None
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            fields = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"line {number}: found {shortened([repr(line)])}, "
                             "expected a JSON object with each key once")
        if names is None:
            names = list(fields)
            yield 0, names
        yield number, [fields.get(name) for name in names]


READERS = {".csv": csv_lines, ".tsv": tsv_lines, ".jsonl": jsonl_lines}
TEXT_COLUMNS = (("sentence",), SENTENCES)       # of one text and of a pair, where the user doesn't name them


def read_hub_split(split, task, where):
    """Turns one split of a hub data set into a list of Example."""
    columns = [list(split[column]) for column in task.hub_columns]      # list(): the lazy columns are slow item by item
    return [make_example(texts, str(label), task, f"{where} example {i}")
            for i, (*texts, label) in enumerate(zip(*columns, list(split["label"])))]


def make_example(texts, label, task, where):
    """Checks the label: a name of the task's fixed table, or its id in digits."""
    if label == "-1":
        raise InputError(f"{where}: found label -1, expected one of {', '.join(task.label_names)}: "
                         "a split without labels can't be trained on or scored")
    if label in task.label_names:
        k = task.label_names.index(label)
    elif label in map(str, range(len(task.label_names))):
        k = int(label)
    else:
        raise InputError(f"{where}: found label {label!r}, expected one of {', '.join(task.label_names)} "
                         f"or 0 … {len(task.label_names) - 1}")
    return Example(texts[0], texts[1] if len(texts) == 2 else None, k)


def load_from_hub(flag, load):
    """Calls `load`, with one look beforehand whether the hub answers: its client retries for half a minute."""
    ways_on = "use --data_dir and a --model directory, or HF_HUB_OFFLINE=1 with a filled cache, or --task toy"
    if not huggingface_hub.is_offline_mode() and not load_from_hub.answered:        # asked once per process
        try:
            huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        except Exception as error:      # whatever the HTTP library raises: there is no answer
            raise InputError(f"{flag}: {huggingface_hub.constants.ENDPOINT} can't be reached "
                             f"({type(error).__name__}); {ways_on}") from None
        load_from_hub.answered = True
    try:
        return load()
    except Exception as error:          # of the hub's client, or of the libraries that read what it brought
        raise InputError(f"{flag}: {first_line(error)} ({ways_on})") from error


load_from_hub.answered = False

# ---------------------------------------------------------------- 3 Toy task

TOY_NOUNS = "film movie plot acting script cast ending music dialogue camera".split()
TOY_GOOD = "great good fine brilliant charming moving funny clever fresh gripping warm superb".split()
TOY_BAD = "bad dull awful boring clumsy weak silly tired stale flat cold poor".split()
TOY_VERBS = "is was seems feels".split()
TOY_ADVERBS = "very rather really quite truly".split()
TOY_OTHER = "the this not never but although i doubt that".split()
TOY_WORDS = TOY_NOUNS + TOY_GOOD + TOY_BAD + TOY_VERBS + TOY_ADVERBS + TOY_OTHER


def toy_examples(num_train=3200, num_dev=800, noise=0.1):
    """Generates the toy task: short film reviews whose harder tiers need several words taken together.

    Tiers, a quarter each: a clause ("the plot was very dull"); a negated clause; two clauses of which one decides
    ("… but X", "X although …"); "i doubt that X" and "… but i doubt that X", where X may be negated.
    Train and dev share no sentence. A share `noise` of the train labels is flipped: real labels are noisy too,
    and on clean ones the two gradients agree as soon as the task is learnt. Dev labels are clean.
    """
    rng = np.random.default_rng(2026)

    def pick(words):
        return words[rng.integers(len(words))]

    def clause(negated=False):
        good = int(rng.integers(2))
        words = [pick(["the", "this"]), pick(TOY_NOUNS), pick(TOY_VERBS)]
        words += [pick(["not", "never"])] * negated + [pick(TOY_ADVERBS)] * int(rng.integers(2))
        return " ".join([*words, pick(TOY_GOOD if good else TOY_BAD)]), good ^ negated

    def review(tier):
        if tier < 2:
            return clause(negated=tier == 1)
        if tier == 2:
            (deciding, label), (other, _) = clause(), clause()
            return (f"{other} but {deciding}" if rng.integers(2) else f"{deciding} although {other}"), label
        (doubted, label), (other, _) = clause(negated=bool(rng.integers(2))), clause()
        return (f"i doubt that {doubted}" if rng.integers(2) else f"{other} but i doubt that {doubted}"), 1 - label

    reviews = {}                                                # a dict keeps each sentence once
    for tier in itertools.cycle(range(4)):
        sentence, label = review(tier)
        reviews.setdefault(sentence, label)
        if len(reviews) == num_train + num_dev:
            break
    examples = [Example(sentence, None, int(label)) for sentence, label in reviews.items()]
    train = [example._replace(label=example.label ^ int(rng.random() < noise)) for example in examples[:num_train]]
    return train, examples[num_train:]


def toy_tokenizer():
    """A word-level tokenizer of the toy's words, BERT-style: [CLS] first, [SEP] after each sentence."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate(special + TOY_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=128, padding_side="right", model_input_names=["input_ids", "token_type_ids", "attention_mask"])


# ----------------------------------------------------------------- 4 Batches

class Split(NamedTuple):
    """One tokenised split of n examples."""
    inputs: dict                # name → list of n tensors (tokens,), the names that the tokenizer returns
    labels: torch.Tensor        # (n,)
    lengths: np.ndarray         # (n,) tokens per example
    padding: dict               # name → the value that fills up
    truncated: float = 0.0      # share in percent of the examples that were cut
    unknown: float = 0.0        # share in percent of the tokens that the tokenizer doesn't know


def encode(tokenizer, examples, max_length):
    """Tokenises a list of Example once, pairs as pairs, the longer sentence cut first. → Split."""
    first = [example.sentence1 for example in examples]
    second = None if examples[0].sentence2 is None else [example.sentence2 for example in examples]
    encoded = tokenizer(first, second, verbose=False)
    # Cut here, with the result of truncation=True, which takes time quadratic in the length of two long texts.
    too_long = [i for i, ids in enumerate(encoded["input_ids"]) if len(ids) > max_length]
    for i in too_long:
        kept = kept_tokens(encoded.sequence_ids(i), max_length)
        for column in encoded.values():
            column[i] = [column[i][at] for at in kept]
    inputs = {name: [torch.tensor(ids) for ids in column] for name, column in encoded.items()}
    padding = {name: tokenizer.pad_token_id if name == "input_ids" else 0 for name in inputs}
    unknown = (torch.cat(inputs["input_ids"]) == tokenizer.unk_token_id).float().mean().item()
    return Split(inputs, torch.tensor([example.label for example in examples]),
                 np.array([len(ids) for ids in inputs["input_ids"]]), padding,
                 100 * len(too_long) / len(examples), 100 * unknown)


def kept_tokens(sequence_ids, max_length):
    """Positions that stay when the longer of two texts is cut first. sequence_ids: 0, 1, None for special tokens."""
    places = [[at for at, which in enumerate(sequence_ids) if which == text] for text in (0, 1, None)]
    room = max_length - len(places[2])
    shorter, longer = sorted(places[:2], key=len)
    shorter = shorter[:room // 2]
    return sorted([*shorter, *longer[:room - len(shorter)], *places[2]])


def note_losses(name, split, max_length, file=None):
    """Says so where more than 1 % of a split's examples were cut, or of its tokens are unknown to the tokenizer."""
    if split.truncated > 1:
        print(f"note: {name}: {split.truncated:.1f} % of the examples are longer than {max_length} tokens and were cut "
              "(--max_length)", file=file)
    if split.unknown > 1:
        print(f"note: {name}: {split.unknown:.1f} % of the tokens are unknown to the model's tokenizer", file=file)


def make_batch(split, rows, device):
    """Pads the examples `rows` on the right, to the longest of them. → dict of (N, L) tensors, labels (N,)."""
    inputs = {name: pad_sequence([column[i] for i in rows], batch_first=True, padding_value=split.padding[name])
              for name, column in split.inputs.items()}
    return ({name: ids.to(device, non_blocking=True) for name, ids in inputs.items()},
            split.labels[rows].to(device, non_blocking=True))


def length_bucketed_batches(lengths, batch_size, generator):
    """Random batches of examples of like length, so that little is padded.

    Shuffle, sort by length within windows of 50 batches, cut into batches, shuffle the batches.
    lengths (n,) tokens; generator a numpy Generator. → list of index arrays, all but one of `batch_size`.
    """
    lengths, order = np.asarray(lengths), generator.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), 50 * batch_size):
        window = order[start:start + 50 * batch_size]
        window = window[np.argsort(lengths[window], kind="stable")]
        batches += [window[i:i + batch_size] for i in range(0, len(window), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def epoch_batches(split, batch_size, seed, epoch):
    """The updates of one epoch: a list of batches, each a list of micro-batches of at most 32 row numbers.

    The order depends on seed and epoch only, so that an epoch can be repeated without those before it.
    """
    batches = length_bucketed_batches(split.lengths, batch_size, np.random.default_rng([seed, epoch]))
    return [np.array_split(batch, math.ceil(len(batch) / 32)) for batch in batches]


# ------------------------------------------------------------------ 5 Models

def load_backbone(name, num_layers=None):
    """Loads tokenizer and encoder, in float32 and without a pooler. → (tokenizer, backbone)

    name        "tiny" (6 random layers of width 64, drawn from torch's generator), a hub name, or a directory
    num_layers  keep only the first n layers (all, where there are no more)
    Raises InputError where there is no such model or it is of another family than BERT and RoBERTa.
    """
    if name == "tiny":
        tokenizer = toy_tokenizer()
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=128, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0)       # too small to overfit; dropout would cost a third of its time
        backbone = transformers.BertModel(config, add_pooling_layer=False)
    else:
        tokenizer, backbone = load_pretrained(name)
    if num_layers is not None:
        backbone.encoder.layer = backbone.encoder.layer[:num_layers]
        backbone.config.num_hidden_layers = len(backbone.encoder.layer)
    return tokenizer, backbone


def load_pretrained(name):
    """Loads a BERT or RoBERTa from a directory or the hub, as `load_backbone` describes. → (tokenizer, backbone)"""
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~"))):
        raise InputError(f"--model {name}: no such directory")
    if Path(name).is_file():
        raise InputError(f"--model {name}: found a file, expected a directory or a hub name")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()        # weights that aren't used; missing ones are checked below

    def load():
        config = transformers.AutoConfig.from_pretrained(name)
        if config.model_type not in ("bert", "roberta"):
            raise ValueError(f"found a model of type {config.model_type}, expected bert or roberta")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, padding_side="right")
        return tokenizer, *transformers.AutoModel.from_pretrained(
            name, config=config, dtype=torch.float32, add_pooling_layer=False, output_loading_info=True,
            attn_implementation="sdpa")         # `early_exit` gives the layers a boolean mask, which others misread

    if Path(name).is_dir():
        try:
            tokenizer, backbone, info = load()
        except Exception as error:      # whatever the libraries make of a damaged file
            raise InputError(f"--model {name}: can't be loaded ({first_line(error)})") from error
    else:
        tokenizer, backbone, info = load_from_hub(f"--model {name}", load)
    if not backbone.config.vocab_size / 2 < len(tokenizer) <= backbone.config.vocab_size:
        raise InputError(f"--model {name}: found a tokenizer of {len(tokenizer):,} tokens, expected about "
                         f"{backbone.config.vocab_size:,}, the model's; is tokenizer.json or vocab.txt missing?")
    if info["missing_keys"]:
        raise InputError(f"--model {name}: the checkpoint lacks {len(info['missing_keys'])} weights, "
                         f"{sorted(info['missing_keys'])[0]} among them")
    return tokenizer, backbone


class MHAExit(nn.Module):
    """The multi-head attention exit: a narrow self-attention over one layer's hidden states (paper §3.2).

    Only [CLS]'s output is used, so only [CLS] is a query: O(L) instead of O(L²), and the same result.
    """

    def __init__(self, width, num_labels, exit_width=64, num_heads=4, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.down = nn.Linear(width, exit_width)
        self.query, self.key, self.value, self.output = (nn.Linear(exit_width, exit_width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(exit_width, num_labels)
        initialise(self)

    @property
    def label_embeddings(self):
        """l (K, d_e): row k embeds class k. The classifier's weight; its bias is no part of it."""
        return self.classifier.weight

    def forward(self, hidden, mask):
        """hidden (N, L, d), mask (N, L) nonzero at tokens → h (N, d_e), logits (N, K)."""
        x = torch.tanh(self.down(hidden))                                           # (N, L, d_e)
        q, k, v = (projection(part).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)     # (N, heads, 1, d_e/heads),
                   for projection, part in ((self.query, x[:, :1]), (self.key, x), (self.value, x)))    # L for k and v
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None])
        h = torch.tanh(self.output(attended.transpose(1, 2).flatten(1)))            # (N, d_e)
        return h, self.classifier(self.dropout(h))      # the contrastive losses see h before the dropout


class LinearExit(nn.Module):
    """The linear exit: h is [CLS]'s hidden state itself, so d_e = d."""

    def __init__(self, width, num_labels, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, num_labels)
        initialise(self)

    @property
    def label_embeddings(self):
        """l (K, d): row k embeds class k. The classifier's weight; its bias is no part of it."""
        return self.classifier.weight

    def forward(self, hidden, mask):
        """hidden (N, L, d), mask unused → h (N, d), logits (N, K)."""
        h = hidden[:, 0]
        return h, self.classifier(self.dropout(h))


EXITS = {"mha": MHAExit, "linear": LinearExit}


def initialise(exit_):
    """Xavier-uniform weights, zero biases: BERT's N(0, 0.02) shrinks the signal through the exit's three layers."""
    for module in exit_.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


# ------------------------------------------------------------------ 6 Losses

def at_least_float32(tensor):
    """Half and bf16 become float32; float32 and float64 stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def supervised_contrastive_loss(h, y, temperature):
    """Rows of one class attract each other, all others repel (Khosla et al. 2020, L_out; paper §4.1).

    L = mean over anchors i with P(i) ≠ ∅ of −1/|P(i)| Σ_{p∈P(i)} log( exp(z_i·z_p/τ) / Σ_{a≠i} exp(z_i·z_a/τ) )

    with z = h/‖h‖ and P(i) the other rows with label y_i. Rows without such a partner are left out of the mean;
    if there are none with one, the loss is 0 and still attached to the graph.
    h (n, d_e) any float type, y (n,) integer, temperature τ > 0 → scalar, computed in float32 or better.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, found {temperature}")
    with torch.autocast(h.device.type, enabled=False):          # autocast would multiply in bf16
        z = F.normalize(at_least_float32(h), dim=1)             # (n, d_e)
        self_pair = torch.eye(len(y), dtype=torch.bool, device=y.device)
        similarity = (z @ z.T / temperature).masked_fill(self_pair, -torch.inf)     # (n, n)
        log_probability = similarity - similarity.logsumexp(dim=1, keepdim=True)
        positive = (y[:, None] == y[None, :]) & ~self_pair
        count = positive.sum(dim=1)                             # |P(i)|, (n,)
        # where(), not a product with the mask: −∞ · 0 is nan. clamp(min=1): anchors without partner give 0/1.
        per_anchor = -torch.where(positive, log_probability, 0).sum(dim=1) / count.clamp(min=1)
        return per_anchor.sum() / (count > 0).sum().clamp(min=1)


def distillation_loss(student_logits, teacher_logits, temperature):
    """KL(softmax(teacher/T) ‖ softmax(student/T)) · T², mean over the batch; no gradient to the teacher.

    logits (N, K) each, temperature T > 0 → scalar, computed in float32 or better.
    """
    with torch.autocast(student_logits.device.type, enabled=False):
        student = F.log_softmax(at_least_float32(student_logits) / temperature, dim=1)
        teacher = F.log_softmax(at_least_float32(teacher_logits.detach()) / temperature, dim=1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature ** 2


# --------------------------------------------------------------- 7 Gradients

def loss_gradients(loss, parameters, retain_graph=False):
    """Gradients of one loss alone. → list as long as `parameters`, None where the loss doesn't reach."""
    return list(torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True))


def gradient_angle(first, second):
    """Angle γ between two gradients, each a list of tensors seen as one long vector (paper §4.3).

    None counts as zeros. → degrees, 0-dim tensor; nan where either vector is zero or not finite: there is no angle.
    """
    pairs = [(torch.zeros_like(y) if x is None else x, torch.zeros_like(x) if y is None else y)
             for x, y in zip(first, second, strict=True) if x is not None or y is not None]
    if not pairs:
        return torch.tensor(torch.nan)
    # Many short tensors joined cost one product instead of many; long ones aren't copied.
    vectors = [(x.flatten(), y.flatten()) for x, y in pairs if x.numel() > 100_000]
    short = [(x.flatten(), y.flatten()) for x, y in pairs if x.numel() <= 100_000]
    if short:
        vectors.append([torch.cat(side) for side in zip(*short)])

    def total(products):
        products = torch.stack(products)
        return (products if products.device.type == "mps" else products.double()).sum()     # mps has no float64

    vectors = [(at_least_float32(x), at_least_float32(y)) for x, y in vectors]
    norms = total([x @ x for x, _ in vectors]).sqrt() * total([y @ y for _, y in vectors]).sqrt()
    cosine = (total([x @ y for x, y in vectors]) / norms).clamp(-1, 1)      # rounding can push it over 1
    return torch.where(norms.isfinite(), torch.rad2deg(torch.acos(cosine)), torch.nan)     # 0/inf would pass for 90°


def add_gradients(parameters, *weighted):
    """parameter.grad += Σ weight · gradient, for pairs (weight, gradients) as `loss_gradients` gives them.

    A weight is a number or a 0-dim tensor. Empties the gradient lists on the way, to have no third set in memory.
    """
    for i, parameter in enumerate(parameters):
        for weight, gradients in weighted:
            gradient, gradients[i] = gradients[i], None
            if gradient is not None:
                gradient = gradient * weight
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


# ------------------------------------------------------------ 8 Optimisation

def make_optimizer(model, lr, num_updates):
    """AdamW (weight decay 0.01, none on biases and LayerNorm) and its schedule. → (optimizer, schedule)

    The rate climbs for the first tenth of the updates to `lr`, then falls in a straight line. The first and the
    last update both have a rate above 0; it is 0 only after the last.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.01},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
    warmup = max(1, round(0.1 * num_updates))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warmup, (num_updates - done) / (num_updates - warmup + 1)))
    return optimizer, schedule


def apply_update(optimizer, schedule):
    """Clips the gradients at norm 1 and updates, unless a gradient is inf or nan. → 1.0 where skipped, else 0.0

    Whether to skip is decided on the device: fused AdamW takes `found_inf`, the flag that torch's GradScaler sets
    too, and leaves weights, moments and step count as they are where it is 1. The host never waits.
    """
    norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return optimizer.found_inf


# -------------------------------------------------------------- 9 Evaluation

class HiddenStates:
    """The hidden states of layers 1 … M on one split, as constants: no gradient goes back into the backbone.

    place None: each call of `batch` runs the backbone as it then is. Else the backbone runs here, once, and its states
    stay on the device `place`, without padding and in the run's precision.
    """

    def __init__(self, backbone, split, args, place=None):
        self.backbone, self.split, self.args, self.stored = backbone, split, args, None
        self.starts = split.lengths.cumsum() - split.lengths        # where each example's tokens begin in the store
        if place is None:
            return
        shape = backbone.config.num_hidden_layers, int(split.lengths.sum()), backbone.config.hidden_size
        # Allocated outside inference mode: autograd saves an exit's inputs, and refuses inference tensors.
        stored = torch.empty(shape, dtype=state_dtype(args), device=place)              # (M, all tokens, d)
        with torch.inference_mode():
            for rows in batches_by_length(split):
                hidden, mask, _ = self.batch(rows)
                tokens = self.token_rows(rows, mask.shape[1])[mask.cpu()].to(place)
                for layer, states in zip(stored, hidden):
                    layer[tokens] = states[mask].to(place)
        self.stored = stored

    def token_rows(self, rows, L):
        """Where the tokens of the examples `rows` are stored. → (N, L); padding points at others, it is masked."""
        last = int(self.starts[-1] + self.split.lengths[-1]) - 1
        return (torch.from_numpy(self.starts[rows])[:, None] + torch.arange(L)).clamp(max=last)

    def batch(self, rows):
        """→ hidden states, M tensors (N, L, d); mask (N, L), True at tokens; labels (N,)."""
        device = self.args.device
        if self.stored is None:
            inputs, y = make_batch(self.split, rows, device)
            with torch.no_grad(), autocast(self.args):
                hidden = self.backbone(**inputs, output_hidden_states=True).hidden_states[1:]   # [0] is the embeddings
            return [states.to(state_dtype(self.args)) for states in hidden], inputs["attention_mask"].bool(), y
        lengths = torch.from_numpy(self.split.lengths[rows])
        L = int(lengths.max())
        mask = torch.arange(L) < lengths[:, None]                                       # (N, L)
        tokens = self.token_rows(rows, L).flatten().to(self.stored.device)
        hidden = [layer.index_select(0, tokens).unflatten(0, mask.shape).to(device) for layer in self.stored]
        return hidden, mask.to(device), self.split.labels[rows].to(device)


def hidden_states(backbone, data, args, place=None):
    """HiddenStates of each split that the task has, by its name. → dict"""
    return {name: HiddenStates(backbone, split, args, place) for name, split in data.splits.items()}


def state_dtype(args):
    """The type hidden states are stored in: the one that the exits compute in."""
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


def autocast(args):
    """The run's precision, as a context: bf16 where --precision says so."""
    return torch.autocast(args.device.type, torch.bfloat16, enabled=args.precision == "bf16")


def freeze(backbone, data, args):
    """Freezes the backbone and stores its hidden states on all splits, if they fit. → dict of HiddenStates

    They go to the device if it has room, else to the host's memory, else nowhere: then each epoch runs the backbone.
    --cache_gb is the bound, by default a third of what is free. Says what is needed before it starts.
    """
    backbone.requires_grad_(False).eval()       # eval: a teacher that drops out would contradict itself
    tokens = sum(int(split.lengths.sum()) for split in data.splits.values())
    M, d = backbone.config.num_hidden_layers, backbone.config.hidden_size
    need = tokens * M * d * state_dtype(args).itemsize
    for place in (args.device, torch.device("cpu")):
        free = free_bytes(place)
        bound = free / 3 if args.cache_gb is None else min(args.cache_gb * 1e9, free)
        if need <= bound:
            break
    else:
        place = None
    what = f"{tokens:,} tokens × {M} layers × {d} × {state_dtype(args).itemsize} bytes = {need / 1e9:.2f} GB"
    print(f"hidden states: {what},", f"kept on {place.type}" if place else
          f"over the bound of {bound / 1e9:.2f} GB (--cache_gb): the backbone runs in every epoch")
    return hidden_states(backbone, data, args, place)


def free_bytes(place):
    """Memory free on a device, in bytes; the host's for mps, which shares it."""
    if place.type == "cuda":
        torch.cuda.empty_cache()                # what torch holds without using it is free too
        return torch.cuda.mem_get_info(place)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    except OSError:                             # macOS: half of what is built in; Windows doesn't say
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 6e9


def batches_by_length(split, batch_size=64):
    """All rows of a split in batches, the longest first."""
    order = np.argsort(-split.lengths, kind="stable")
    return [order[start:start + batch_size] for start in range(0, len(order), batch_size)]


@torch.inference_mode()
def predict(exits, states, batch_size=64):
    """Predicted classes of the exits on the last len(exits) layers. → numpy (exits, n), rows in the split's order

    states: HiddenStates of the split. Exits and backbone are to be in evaluation mode.
    """
    device = states.args.device
    predictions = torch.empty(len(exits), len(states.split.labels), dtype=torch.long, device=device)
    for rows in batches_by_length(states.split, batch_size):
        hidden, mask, _ = states.batch(rows)
        with autocast(states.args):
            logits = [exit_(layer, mask)[1] for exit_, layer in zip(exits, hidden[-len(exits):])]
        predictions[:, torch.from_numpy(rows)] = torch.stack(logits).argmax(dim=2)      # (exits, N, K) → (exits, N)
    return predictions.cpu().numpy()


def evaluate_exits(exits, states, args):
    """Scores each exit on dev, as `glue_scores` does; for MNLI the mismatched half too, as "accuracy_mismatched".

    states: dict of HiddenStates, "dev" among them. → one dict per exit. Leaves backbone and exits in evaluation mode.
    """
    for module in (states["dev"].backbone, *exits):
        module.eval()
    scores = [glue_scores(args.task, p, states["dev"].split.labels) for p in predict(exits, states["dev"])]
    if "dev_mismatched" in states:
        mismatched = states["dev_mismatched"]
        for of_exit, p in zip(scores, predict(exits, mismatched)):
            of_exit["accuracy_mismatched"] = glue_scores(args.task, p, mismatched.split.labels)["accuracy"]
    return scores


def evaluate(model, data, args):
    """`evaluate_exits` for a model with one exit, on the last layer. → dict of scores"""
    return evaluate_exits([model["exit"]], hidden_states(model["backbone"], data, args), args)[0]


def glue_scores(task, predictions, labels):
    """GLUE's scores in percent. → dict; "score" is the task's headline.

    CoLA: Matthews correlation × 100. MRPC, QQP: mean of accuracy and F1 of class 1. All others: accuracy, and for a
    task of the user's own also macro-F1, the mean of F1 over the classes that occur in labels or predictions.
    "collapsed" is there, and True, where all predictions are one class although the labels aren't. Where F1 or
    Matthews divides by zero (one class only) it is 0, and "note" says so.
    predictions, labels: sequences of n class ids, n ≥ 1, else ValueError.
    """
    p, y = np.asarray(predictions), np.asarray(labels)
    if len(y) == 0 or len(p) != len(y):
        raise ValueError(f"found {len(p)} predictions and {len(y)} labels, expected as many of each and at least one")
    scores = {"accuracy": 100 * float(np.mean(p == y))}
    if len(set(p)) == 1 < len(set(y)):
        scores["collapsed"] = True
    metric = TASKS[task].metric if task in TASKS else "accuracy"
    if task not in ("toy", *TASKS):
        scores["macro_f1"] = 100 * float(np.mean([2 * np.sum((p == k) & (y == k)) / (np.sum(p == k) + np.sum(y == k))
                                                  for k in set(p) | set(y)]))
    if metric == "accuracy":
        return scores | {"score": scores["accuracy"]}
    tp, tn, fp, fn = (float(np.sum((p == a) & (y == b))) for a, b in ((1, 1), (0, 0), (1, 0), (0, 1)))
    if metric == "matthews":
        bottom = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
        scores["matthews"] = scores["score"] = 100 * (tp * tn - fp * fn) / bottom if bottom else 0.0
    else:
        bottom = 2 * tp + fp + fn
        scores["f1"] = 100 * 2 * tp / bottom if bottom else 0.0
        scores["score"] = (scores["accuracy"] + scores["f1"]) / 2
    if not bottom:
        scores["note"] = f"{'Matthews' if metric == 'matthews' else 'F1'} is 0/0 here, taken as 0: one class only"
    return scores


# ------------------------------------------------------------ 10 Early exit

# What the sweep tries. A sample leaves at the first exit whose …
POLICIES = {
    "entropy": (0.05, 0.1, 0.2, 0.4, 0.6),          # entropy / log K is below it (DeeBERT, FastBERT)
    "patience": (1, 2, 3, 4),                       # p: prediction is the same for the p+1st time running (PABEE)
    "confidence": (0.99, 0.95, 0.9, 0.8, 0.7),      # top probability is above it (Shallow-Deep)
}


@torch.inference_mode()
def early_exit(model, inputs, policy="entropy", threshold=0.2):
    """Runs layer after layer; a sample whose exit is sure enough leaves, and no later layer computes it.

    model      {"backbone", "exits"} in evaluation mode, as `load_model` returns it
    inputs     input_ids, attention_mask (N, L) and, for BERT, token_type_ids
    policy     "entropy": leave where entropy / log K < threshold; "confidence": where the top probability > threshold;
               "patience": where the prediction is the same for the threshold+1st time running
    → logits (N, K) of the exit where each sample left; layers (N,), 1 … M, that were run for it; in the inputs' order
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, found {policy!r}")
    if len(model["exits"]) != model["backbone"].config.num_hidden_layers:
        raise ValueError(f"found {len(model['exits'])} exits, expected one on each layer")
    mask = inputs["attention_mask"].bool()                                              # (N, L)
    hidden = model["backbone"].embeddings(
        input_ids=inputs["input_ids"], token_type_ids=inputs.get("token_type_ids"))     # (N, L, d)
    M = len(model["exits"])
    rows = torch.arange(len(mask), device=mask.device)  # where the samples still inside stand in the input
    previous, streak, layers = torch.full_like(rows, -1), torch.zeros_like(rows), torch.zeros_like(rows)
    for m, (layer, exit_) in enumerate(zip(model["backbone"].encoder.layer, model["exits"]), start=1):
        hidden = layer(hidden, mask[:, None, None])
        logits = exit_(hidden, mask)[1].float()         # (samples still inside, K)
        if m == 1:
            left = torch.empty_like(logits)
        prediction = logits.argmax(dim=1)
        streak = torch.where(prediction == previous, streak + 1, 1)
        if policy == "entropy":
            sure = entropy(logits) < threshold
        elif policy == "confidence":
            sure = logits.softmax(dim=1).amax(dim=1) > threshold
        else:
            sure = streak > threshold
        stay = (~sure).nonzero()[:, 0] if m < M else rows[:0]       # its size is needed: the one wait per layer
        left[rows], layers[rows] = logits, m            # overwritten at later layers by the samples that stay
        if len(stay) == 0:
            break
        if len(stay) < len(rows):
            hidden, mask, rows, prediction, streak = (x[stay] for x in (hidden, mask, rows, prediction, streak))
        previous = prediction
    return left, layers


def entropy(logits):
    """Entropy of softmax(logits (N, K)), divided by log K: 0 where all is certain, 1 where nothing is. → (N,)"""
    log_p = F.log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1) / math.log(logits.shape[1])


@torch.inference_mode()
def full_model(model, inputs):
    """The model without early exit: the whole backbone, then the last exit alone. → logits (N, K)"""
    hidden = model["backbone"](**inputs).last_hidden_state
    return model["exits"][-1](hidden, inputs["attention_mask"])[1].float()


def early_exit_sweep(model, split, args, timed=64):
    """Each policy at each of its thresholds on one split, by layers and by the clock. → list of dicts

    "score" and "layers" (list of n) come from all examples in batches of 32. "batch 32" and "batch 1" are the
    full model's seconds over the early exit's; at batch 1 on the first `timed` examples only. The full model runs
    anew for each policy, near the runs it is compared with.
    """
    model.eval().requires_grad_(False)      # autocast would keep the bf16 copies of trainable weights alone
    rows_32 = batches_by_length(split, 32)
    back = np.argsort(np.concatenate(rows_32))          # from the order of lengths to the split's
    batches = {"batch 32": [make_batch(split, rows, args.device)[0] for rows in rows_32],
               "batch 1": [make_batch(split, [i], args.device)[0] for i in range(min(timed, len(back)))]}

    def seconds(forward, inputs):
        started = time.perf_counter()
        with autocast(args):
            outputs = [forward(model, each) for each in inputs]
        outputs[-1][0].cpu()                            # waits for the device
        return time.perf_counter() - started, outputs

    for inputs in batches.values():                     # warm-up
        seconds(full_model, inputs[:3]), seconds(early_exit, inputs[:3])
    sweep = []
    for policy, thresholds in POLICIES.items():
        full = {name: seconds(full_model, inputs)[0] for name, inputs in batches.items()}
        for threshold in thresholds:
            if policy == "patience" and threshold >= len(model["exits"]):       # would never leave early
                continue
            row = {"policy": policy, "threshold": threshold}
            for name, inputs in batches.items():
                ours, outputs = seconds(functools.partial(early_exit, policy=policy, threshold=threshold), inputs)
                row[name] = full[name] / ours
                if name == "batch 32":
                    logits, layers = (torch.cat(parts).cpu().numpy() for parts in zip(*outputs))
            row["score"] = glue_scores(args.task, logits.argmax(axis=1)[back], split.labels)["score"]
            row["layers"] = layers[back].tolist()
            sweep.append(row)
    return sweep


def save_model(folder, tokenizer, model, settings):
    """Saves backbone and tokenizer as transformers does, the exits as exits.safetensors, settings as settings.json.

    All is written beside the folder first. Raises InputError where it can't be; what was in the folder stays.
    """
    folder = Path(folder)
    temporary = folder.with_name(folder.name + ".tmp")
    transformers.utils.logging.disable_progress_bar()
    try:
        model["backbone"].save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        save_file({name: weight.contiguous() for name, weight in model["exits"].state_dict().items()},
                  temporary / "exits.safetensors")
        (temporary / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for file in temporary.iterdir():
            os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: the model can't be saved ({first_line(error)}); what was there before is whole"
                         ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def reserve(folder):
    """Makes the folder for `save_model`, before hours of training. An older model there will be overwritten.

    Raises InputError where it can't be made, or holds other files: they might be part of another model.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--save {folder}: {error.strerror}, so the model can't be saved there") from None
    if any(folder.iterdir()) and not (folder / "settings.json").exists():
        raise InputError(f"--save {folder}: found other files there, expected an empty folder or an earlier --save")


def load_model(folder):
    """Loads what `save_model` wrote, onto the CPU, in evaluation mode. → tokenizer, model, settings

    Raises InputError where a file is missing or isn't what it should be.
    """
    try:
        settings = json.loads((Path(folder) / "settings.json").read_text(encoding="utf-8"))
        weights = load_file(Path(folder) / "exits.safetensors")
        make_exit, num_labels = EXITS[settings["exit"]], len(settings["label_names"])
        settings["task"], settings["columns"], settings["max_length"]           # a KeyError where one is missing
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"{folder}: not a model that --save wrote ({first_line(error)})") from None
    tokenizer, backbone = load_backbone(folder)
    config = backbone.config
    exits = nn.ModuleList(make_exit(config.hidden_size, num_labels) for _ in range(config.num_hidden_layers))
    try:
        exits.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{folder}: exits.safetensors doesn't fit settings.json ({first_line(error)})") from None
    return tokenizer, nn.ModuleDict({"backbone": backbone, "exits": exits}).eval(), settings


def score_saved(args):
    """--load: scores the exits of a saved model anew on dev and tries early exit on it."""
    _, model, settings = load_model(args.load)
    args.model, args.max_length = args.load, settings["max_length"]
    data = prepare(args)
    if (settings["task"], settings["label_names"]) != (task_name(args), list(data.label_names)):
        raise InputError(f"--load {args.load}: trained on --task {settings['task']} with the labels "
                         f"{shortened(settings['label_names'])}, found --task {task_name(args)} with "
                         f"{shortened(data.label_names)}")
    scores = evaluate_exits(model.to(args.device)["exits"], hidden_states(model["backbone"], data, args), args)
    for name, each in (("saved", settings["scores"]), ("loaded", [exit_["score"] for exit_ in scores])):
        print(f"{name:>9}: dev " + " ".join(f"{score:.1f}" for score in each))
    print("\n" + early_exit_table(early_exit_sweep(model, data.dev, args), len(scores)))


def predict_file(args):
    """--predict: labels the texts of a file with the model in --load, to standard output or --out_file.

    A line per text, in order: label, probability and exit layer, with tabs between. The label column isn't read.
    """
    tokenizer, model, settings = load_model(args.load)
    if args.policy == "patience" and (args.threshold % 1 or not 1 <= args.threshold < len(model["exits"])):
        raise InputError(f"--threshold: found {args.threshold:g}, expected a whole number from 1 to "
                         f"{len(model['exits']) - 1} with --policy patience and this model")
    columns = tuple(args.columns or settings["columns"])
    if len(columns) != len(settings["columns"]):
        raise InputError(f"--columns: found {', '.join(columns)}, expected {len(settings['columns'])}, as the "
                         f"model was trained on {', '.join(settings['columns'])}")
    if Path(args.predict).suffix not in READERS:
        raise InputError(f"--predict {args.predict}: found {Path(args.predict).suffix or 'no ending'}, expected "
                         f"{', '.join(READERS)}")
    if args.out_file and Path(args.out_file).resolve() == Path(args.predict).resolve():
        raise InputError(f"--out_file {args.out_file}: found the file to predict on, expected another")
    _, table = read_table(args.predict, [columns])
    examples = [own_example(columns, texts, 0, f"{args.predict} line {number}") for number, texts in table]
    split = encode(tokenizer, examples, settings["max_length"])
    note_losses(args.predict, split, settings["max_length"], file=sys.stderr)
    model.to(args.device)
    lines = [None] * len(table)
    for rows in tqdm(batches_by_length(split, 32), desc="predicting", disable=None, leave=False):
        with autocast(args):
            logits, layers = early_exit(model, make_batch(split, rows, args.device)[0], args.policy, args.threshold)
        probability, label = logits.softmax(dim=1).max(dim=1)
        for row, k, p, layer in zip(rows, label.tolist(), probability.tolist(), layers.tolist()):
            lines[row] = f"{settings['label_names'][k]}\t{p:.4f}\t{layer}\n"
    if args.out_file is None:
        sys.stdout.writelines(lines)
        return
    with whole_file(args.out_file) as file:
        file.write("".join(lines).encode())


# ------------------------------------------------------------------ 11 Runs

def prepare(args):
    """Loads and tokenises the task, makes the run's folder, prints the first line. → TaskData of Splits

    Fills in args.batch_size, where it wasn't given, and args.fingerprint. Raises InputError where flags don't fit.
    """
    task = load_task(args.task, args.data_dir, args.limit, args.columns)
    tokenizer, backbone = load_backbone(args.model)
    config = backbone.config                                        # RoBERTa's first positions are for padding
    longest = config.max_position_embeddings - (config.pad_token_id + 1 if config.model_type == "roberta" else 0)
    if args.max_length > longest:
        raise InputError(f"--max_length: found {args.max_length}, expected ≤ {longest}, the positions of {args.model}")
    for flag in ("num_layers", "tsne"):
        if not 1 <= (getattr(args, flag, None) or 1) <= config.num_hidden_layers:
            raise InputError(f"--{flag}: found {getattr(args, flag)}, expected 1 … {config.num_hidden_layers}, "
                             f"the layers of {args.model}")
    if "exit_lr" in args and config.num_hidden_layers < 2:
        raise InputError(f"--model {args.model}: found one layer, expected two or more for exits to lie on")
    data = task._replace(**{name: encode(tokenizer, split, args.max_length) for name, split in task.splits.items()})
    args.batch_size = args.batch_size or max(8, round(len(task.train) / 200))       # about 200 updates an epoch
    args.fingerprint = fingerprint(task, data, backbone, args)
    folder = run_folder(args)
    try:
        folder.mkdir(parents=True, exist_ok=True)                   # before hours of training
    except OSError as error:
        raise InputError(f"--out {args.out}: {folder} can't be made ({error.strerror})") from None
    if args.rank > 0:
        return data

    kind = getattr(args, "exit", ["mha"])[0]
    in_backbone, in_exit = (sum(p.numel() for p in module.parameters())
                            for module in (backbone, EXITS[kind](config.hidden_size, task.num_labels)))
    share = 100 * in_exit / in_backbone
    print(f"task {task_name(args)}: {len(task.train):,} train, {len(task.dev):,} dev, {task.num_labels} classes",
          f"model {model_name(args)}: {in_backbone:,} parameters + {kind} exit {in_exit:,} ({share:.2f} %)",
          f"batch {args.batch_size}, {args.epochs} epochs, lr {args.lr:g}"
          + (f", λ {args.lam:g}, τ {args.tau:g}" if "lam" in args else ""),
          f"{args.device.type} {args.precision}",
          ", ".join(f"{name} {version}" for name, version in VERSIONS.items()),
          sep=" · ", flush=True)
    if args.task not in ("toy", *TASKS):
        counts = Counter(example.label for example in task.train)
        print("labels in train:", shortened([f"{k} {name} ({counts[k]:,})" for k, name in enumerate(task.label_names)]))
    if args.task == "mnli" and not task.dev_mismatched:
        print("note: no dev_mismatched.tsv there, so only the matched half of MNLI's dev set is scored")
    for name, split in data.splits.items():
        note_losses(name, split, args.max_length)
    return data


def fingerprint(task, data, backbone, args):
    """A hash of what a run depends on beside its flags: examples, tokens, pretrained weights, code. → str

    So a record or a checkpoint is never taken for a run of other data, another model or a changed script. The versions
    of the libraries aren't in it, but in each record.
    """
    digest = hashlib.sha256(repr(task).encode())
    for split in data.splits.values():
        digest.update(torch.cat(split.inputs["input_ids"]).numpy())
    for path in (Path(__file__), Path(sys.argv[0])):
        if path.is_file():
            digest.update(path.read_bytes())
    if args.model != "tiny":                                        # its weights are drawn anew by each run
        for weight in backbone.state_dict().values():
            digest.update(weight.contiguous().numpy())
    return digest.hexdigest()


def progress(description, total, done, args):
    """A progress bar of `total` updates of which the share `done` is behind us; in the first process only."""
    return tqdm(total=total, initial=round(done * total), desc=description, disable=args.rank > 0 or None, leave=False)


def show(bar, **values):
    """Puts numbers behind the progress bar, every 20th step only: reading a tensor waits for the device."""
    if not bar.disable and bar.n % 20 == 0:
        bar.set_postfix({name: f"{float(value):.2f}" for name, value in values.items()}, refresh=False)
    bar.update()


def mean_loss(losses, batches, epoch):
    """Mean loss of an epoch. losses (micro-batches,), batches: what `epoch_batches` gave, epoch: counted from 0

    Raises InputError where a loss isn't finite, naming the step and the examples.
    """
    if not losses.isfinite().all():
        i = int((~losses.isfinite()).nonzero()[0])
        update, rows = [(update, rows) for update, batch in enumerate(batches) for rows in batch][i]
        raise InputError(f"epoch {epoch + 1}, update {epoch * len(batches) + update + 1}: found loss {losses[i]:g} on "
                         f"the training examples {shortened(rows + 1, 32)}; try a lower --lr, --precision fp32 or another "
                         "--tau, and look at these examples (the first is 1)")
    return losses.mean().item()


def epoch_line(method, seed, epochs, records):
    """What is printed after an epoch: its loss, score and seconds, and whatever went wrong in it. → str

    With several exits ("exits" in the record) all their scores, from the first layer to the last.
    """
    record = records[-1]
    exits = record.get("exits", [record["scores"]])
    scores = " ".join(f"{scores['score']:.1f}" for scores in exits)
    note = next((f" ({scores['note']})" for scores in exits if "note" in scores), "")
    note += " (collapsed: one class only)" * any("collapsed" in scores for scores in exits)
    skipped = f", {record['skipped']} updates skipped (inf or nan)" if record["skipped"] else ""
    return (f"{method:>9} seed {seed} epoch {len(records)}/{epochs}: loss {record['loss']:.3f}, "
            f"dev {scores}{note}, {record['seconds']:.0f} s{skipped}")


def model_name(args):
    """The last two parts of --model: a folder that is just called "model" says little."""
    return "/".join(part for part in Path(args.model).parts[-2:] if part != os.sep)


def task_name(args):
    """--task, of a folder its name alone."""
    return args.task if args.task in ("toy", *TASKS) else Path(args.task).resolve().name


# Flags that choose which runs are made, and where, but not what comes out.
SELECTIONS = ("task", "data_dir", "out", "seeds", "methods", "strategy", "exit", "num_layers", "exit_seeds", "ablation",
              "lams", "tsne", "save", "load", "predict", "out_file", "policy", "threshold", "cache_gb", "fresh",
              "debug", "rank", "world_size", "device")


def run_folder(args):
    """Folder of the records of one script, task, model and choice of settings; other settings, other folder."""
    settings = {name: str(value) for name, value in vars(args).items() if name not in SELECTIONS}
    settings["device"] = args.device.type                           # cuda:0 and cuda:1 share the runs of one command
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    name = "-".join([task_name(args), *model_name(args).split("/"), digest])
    return Path(args.out) / Path(sys.argv[0]).stem / name


@contextlib.contextmanager
def whole_file(path):
    """A binary file to write into, which takes the place of `path` at the end: whole, or not at all.

    Raises InputError where it can't be written, as on a full disk; what stood at `path` stays.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                        # torch.save makes RuntimeErrors of some OSErrors
        raise InputError(f"{path}: can't be written ({getattr(error, 'strerror', None) or first_line(error)}); "
                         "what was there before is whole") from None
    finally:
        if temporary.is_file():
            temporary.unlink()


def checkpoint_paths(args, name):
    """Where the newest checkpoint of a run lies, and the one before."""
    return [run_folder(args) / f"{name}.{which}.pt" for which in ("checkpoint", "previous")]


def save_checkpoint(args, name, stateful, records):
    """Saves what the next epoch depends on. The order of its batches comes from seed and epoch alone.

    name      of the run, as its file is called
    stateful  modules, optimisers, schedules: whatever has a state_dict that training changes
    records   one dict per epoch that is done
    """
    newest, previous = checkpoint_paths(args, name)
    generators = {"cpu": torch.get_rng_state()}                     # dropout draws from the device's generator
    if args.device.type != "cpu":
        generators[args.device.type] = getattr(torch, args.device.type).get_rng_state()
    states = [each.state_dict() for each in stateful]
    if newest.exists():
        os.replace(newest, previous)                                # kept, should the newest be damaged
    with whole_file(newest) as file:
        torch.save({"states": states, "generators": generators, "records": records}, file)


def resume(args, name, stateful):
    """Loads the newest whole checkpoint of a run that was stopped, and says so. → records of its epochs, [] if none"""
    if args.fresh:
        drop_checkpoints(args, name)
    for path in checkpoint_paths(args, name):
        if not path.exists():
            continue
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:      # a cut file raises whatever its cut makes of it
            print(f"note: {path} can't be read ({first_line(error)}), it is left out")
            continue
        for each, state in zip(stateful, saved["states"], strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(saved["generators"]["cpu"])
        if args.device.type != "cpu":
            getattr(torch, args.device.type).set_rng_state(saved["generators"][args.device.type])
        print(f"{name}: goes on after epoch {len(saved['records'])}, from {path}")
        return saved["records"]
    return []


def drop_checkpoints(args, name):
    """Removes the checkpoints of a run."""
    for path in checkpoint_paths(args, name):
        path.unlink(missing_ok=True)


def record_path(args, method, seed):
    """The file of one run's record."""
    return run_folder(args) / f"{method}-seed{seed}.json"


def is_finished(args, method, seed):
    """Whether a run's record is there, to be read instead of trained anew; says so, and drops leftover checkpoints.

    With --fresh the record is removed instead.
    """
    path = record_path(args, method, seed)
    if args.fresh:
        path.unlink(missing_ok=True)
    if path.exists():
        drop_checkpoints(args, f"{method}-seed{seed}")
        print(f"{method} seed {seed}: finished before, read from {path} (--fresh trains anew)")
    return path.exists()


def own_share(args, units):
    """Of a list of independent pieces of work those that this process is to do: all, if it is the only one."""
    return units[args.rank::args.world_size]


def write_record(args, method, seed, epochs, **more):
    """Writes one finished run as <folder>/<method>-seed<seed>.json, then drops its checkpoints.

    epochs: one dict per epoch, with "loss", "scores", "angles" (not in 04; scope → degrees per batch, null: no angle
    or not measured), "skipped" (updates with a gradient that wasn't finite) and "seconds" (training alone). With
    several exits also "exits": one dict of scores per exit. more: whatever else the record is to hold.
    """
    settings = {name: str(value) if isinstance(value, torch.device) else value for name, value in vars(args).items()}
    record = {"method": method, "seed": seed, "settings": settings, "versions": VERSIONS, "epochs": epochs, **more}
    with whole_file(record_path(args, method, seed)) as file:
        file.write(json.dumps(record, allow_nan=False).encode())
    drop_checkpoints(args, f"{method}-seed{seed}")


def read_records(args, runs):
    """Waits for torchrun's other processes, then reads the records of all runs, pairs (method, seed). → list of dicts

    Of several processes only the first gets them. The others end here; the first one too, where records are missing,
    and says which.
    """
    if args.world_size > 1 and "MASTER_ADDR" in os.environ:         # torchrun's: all run now, so it can be waited
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if args.rank > 0:
        sys.exit()
    missing = [f"{method} seed {seed}" for method, seed in runs if not record_path(args, method, seed).exists()]
    if missing:
        print(f"\nno table yet, {len(missing)} of {len(runs)} runs are missing: {shortened(missing)}; the same command "
              "prints it when they are there")
        sys.exit()
    return [json.loads(record_path(args, *each).read_text(encoding="utf-8")) for each in runs]


def exit_facts(model):
    """What the record of a multi-exit model holds beside its epochs: layers with an exit, numbers of parameters."""
    M = model["backbone"].config.num_hidden_layers
    return {"layers": list(range(M - len(model["exits"]) + 1, M + 1)),
            "parameters": {name: sum(p.numel() for p in module.parameters()) for name, module in model.items()}}


# --------------------------------------------------------------- 12 Reports

def to_list(angles):
    """Angles (steps,) → plain list, rounded to 0.000001°, None where there is no angle."""
    return [None if math.isnan(angle) else round(angle, 6) for angle in angles.tolist()]


def angles_over(angles, threshold=90.0):
    """Share in percent of the angles over `threshold`, among those that exist; None where there are none."""
    angles = [angle for angle in angles if angle is not None]
    return 100 * sum(angle > threshold for angle in angles) / len(angles) if angles else None


def mean_std(values, digits=1):
    """"mean ± std" (sample standard deviation, over the seeds); a single value has no spread; "–" for no values."""
    values = [value for value in values if value is not None]
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}" if values else "–"


def markdown_table(header, rows):
    """A Markdown table with even columns, ready to paste. → str"""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells)


def other_scores(scores):
    """Names of the scores that say something beside the headline "score". scores: list of dicts, one per run."""
    names = dict.fromkeys(name for each in scores for name in each if name not in ("score", "note", "collapsed"))
    return [name for name in names if any(each[name] != each["score"] for each in scores)]


def score_table(records, threshold=None):
    """One row per method over its seeds: scores of the last epoch, the best epoch's beside it, conflicts, minutes.

    threshold: the gate's angle; adds the share of batches that method "acl" discarded. → Markdown
    """
    last = [record["epochs"][-1]["scores"] for record in records]
    names = ["score"] + other_scores(last)
    gated = ["discarded %"] * (threshold is not None)
    header = ["method", *names, "best epoch", "over 90° %", *gated, "minutes", "seeds"]
    header += ["collapsed"] * any("collapsed" in scores for scores in last)     # runs that predict one class only
    rows = []
    for method, runs in by_method(records).items():
        runs = [run["epochs"] for run in runs]
        angles = [[angle for epoch in run for angle in epoch["angles"]["all"]] for run in runs]
        row = [method, *(mean_std([run[-1]["scores"][name] for run in runs]) for name in names)]
        row.append(mean_std([max(epoch["scores"]["score"] for epoch in run) for run in runs]))
        row.append(mean_std([angles_over(run) for run in angles]))
        if threshold is not None:
            row.append(mean_std([angles_over(run, threshold) for run in angles]) if method == "acl" else "–")
        row += [mean_std([sum(epoch["seconds"] for epoch in run) / 60 for run in runs], digits=2), len(runs)]
        if any("collapsed" in scores for scores in last):
            row.append(sum("collapsed" in run[-1]["scores"] for run in runs))
        rows.append(row)
    return markdown_table(header, rows)


def angle_figure(path, records, threshold=90.0, gated=()):
    """Draws angle against step, one panel per method (its first seed), with the running mean and the threshold.

    Methods in `gated` have their discarded batches marked. Without matplotlib it says so and draws nothing.
    """
    plt = pyplot()
    if plt is None:
        return
    first = {method: runs[0] for method, runs in by_method(records).items()}
    figure, axes = plt.subplots(1, len(first), figsize=(4.5 * len(first), 3.4), sharey=True, squeeze=False)
    for axis, (method, record) in zip(axes[0], first.items()):
        angles = np.array([angle for epoch in record["epochs"] for angle in epoch["angles"]["all"]], dtype=float)
        steps = np.flatnonzero(~np.isnan(angles))
        angles = angles[steps]
        over = angles > threshold
        axis.axhline(threshold, color="black", linewidth=1, label=f"{threshold:g}°")
        axis.scatter(steps[~over], angles[~over], s=4, alpha=0.4, color="tab:blue", label="a batch")
        if over.any():
            word = "discarded" if method in gated else "over it"
            axis.scatter(steps[over], angles[over], s=4, alpha=0.6, color="tab:red",
                         label=f"{word}: {100 * over.mean():.0f} %")
        width = min(len(angles), 50)
        if width:
            axis.plot(steps[width - 1:], np.convolve(angles, np.ones(width) / width, "valid"), color="black",
                      linestyle=":", label=f"mean of {width}")
        axis.set(title=f"{method}, seed {record['seed']}", xlabel="step", ylim=(0, 180), yticks=range(0, 181, 30))
        axis.legend(fontsize=7, loc="upper right")
    axes[0][0].set_ylabel("angle between the gradients (°)")
    save_figure(plt, figure, path)


def pyplot():
    """matplotlib's pyplot, drawing into files; None, and a line that says so, where it isn't installed."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        return plt
    except ImportError:
        print("no figure: matplotlib is missing (pip install matplotlib)")


def save_figure(plt, figure, path):
    """Writes a figure as PNG and says where it is."""
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"figure: {path}")


def by_method(records):
    """The records in groups of one method, in the order in which the methods first appear. → dict"""
    groups = {}
    for record in records:
        groups.setdefault(record["method"], []).append(record)
    return groups


def exit_scores(records):
    """Last epoch's scores of one method's runs, (runs, layers), nan where a layer has no exit."""
    layers = [record["layers"] for record in records]
    scores = np.full((len(records), max(map(max, layers))), np.nan)
    for row, record in zip(scores, records):
        for m, exit_ in zip(record["layers"], record["epochs"][-1]["exits"]):
            row[m - 1] = exit_["score"]
    return scores


def layer_table(records):
    """Layer × method: each exit's score in the last epoch, their average, minutes and parameters. → Markdown

    The average is taken over all exits of a run first, then over the runs. What stage two doesn't change (the last
    exit, the minutes of stage one) counts once per stage one.
    """
    M, columns = max(max(record["layers"]) for record in records), {}
    last = [record["epochs"][-1]["exits"][-1] for record in records]
    others = other_scores(last)
    collapsed = {method: sum("collapsed" in exit_ for run in runs for exit_ in run["epochs"][-1]["exits"])
                 for method, runs in by_method(records).items()}        # exits that predict one class only
    for method, runs in by_method(records).items():
        once = list({str(run["seed"]).split(".")[0]: run for run in runs}.values())         # one run per stage one
        scores = exit_scores(runs)
        cells = [mean_std(layer[~np.isnan(layer)]) for layer in scores.T]
        cells[-1] = mean_std(exit_scores(once)[:, -1])
        cells += ["–"] * (M - len(cells))
        cells += [mean_std([run["epochs"][-1]["exits"][-1][name] for run in once]) for name in others]
        cells += [mean_std(scores.mean(axis=1)) if len(runs[0]["layers"]) > 1 else "–"]     # "first n" has one exit
        for stages in ([run.get("stage_one", run["epochs"]) for run in once],
                       [run["epochs"] for run in runs if "stage_one" in run]):
            cells += [mean_std([sum(epoch["seconds"] for epoch in stage) / 60 for stage in stages], digits=2)]
        parameters = runs[0]["parameters"]
        columns[method] = [*cells, f"{100 * parameters['exits'] / parameters['backbone']:.2f}", len(runs)]
        if any(collapsed.values()):
            columns[method].append(f"{collapsed[method]} of {len(runs) * len(runs[0]['layers'])}")
    names = [*(f"exit {m + 1}" for m in range(M)), *(f"last exit: {name}" for name in others), "average",
             "minutes, stage one", "minutes, stage two", "parameters added %", "runs",
             *["exits collapsed"] * any(collapsed.values())]
    return markdown_table(["score", *columns], zip(names, *columns.values()))


def layer_figure(path, records):
    """Draws score against layer, one curve per method, ± one standard deviation over its runs (paper, Figure 3)."""
    plt = pyplot()
    if plt is None:
        return
    figure, axis = plt.subplots(figsize=(5.5, 3.8))
    for method, runs in by_method(records).items():
        scores = exit_scores(runs)
        at = np.flatnonzero(~np.isnan(scores[0]))
        spread = scores.std(axis=0, ddof=1)[at] if len(runs) > 1 else None
        axis.errorbar(at + 1, scores.mean(axis=0)[at], yerr=spread, marker="o", markersize=4, capsize=2, label=method)
    axis.set(xlabel="exit on layer", ylabel="dev score, last epoch",
             xticks=range(1, max(max(record["layers"]) for record in records) + 1))
    axis.legend(fontsize=8)
    save_figure(plt, figure, path)


def report_exits(folder, records, threshold=None):
    """What 04 and 05 print and draw in the end: layer × score, early exit where a record has a sweep of it.

    threshold: the gate's angle; adds the share of batches whose contrastive term each exit's gate dropped.
    """
    print("\n" + layer_table(records) + "\n")
    layer_figure(folder / "layers.png", records)
    if threshold is not None:
        print("\n" + exit_discard_table(records, threshold))
    for record in records:
        if "early_exit" in record:
            M = len(record["layers"])
            print(f"\nEarly exit, {record['method']}, seed {record['seed']}:\n")
            print(early_exit_table(record["early_exit"], M) + "\n")
            early_exit_figure(folder / f"early_exit-{record['method']}.png", record["early_exit"], M)


def exit_discard_table(records, threshold):
    """Method × exit: share of batches whose γ is over the threshold, where it was measured. → Markdown"""
    rows = []
    for method, runs in by_method(records).items():
        shares = [[angles_over([angle for epoch in run["epochs"] for angle in epoch["angles"][exit_]], threshold)
                   for run in runs] for exit_ in runs[0]["epochs"][0]["angles"]]
        if any(share is not None for share in itertools.chain(*shares)):
            rows.append([method, *map(mean_std, shares)])
    return markdown_table(["batches discarded %", *records[0]["epochs"][0]["angles"]], rows)


def early_exit_table(sweep, num_layers):
    """One row per policy and threshold of `early_exit_sweep`. → Markdown"""
    rows = []
    for row in sweep:
        mean = np.mean(row["layers"])
        rows.append([row["policy"], f"{row['threshold']:g}", f"{row['score']:.1f}", f"{mean:.2f}",
                     *(f"{ratio:.2f}×" for ratio in (num_layers / mean, row["batch 1"], row["batch 32"]))])
    return markdown_table(["policy", "threshold", "score", "mean layers", "speed-up by layers", "by the clock, batch 1",
                           "batch 32"], rows)


def early_exit_figure(path, sweep, num_layers):
    """Left: score against mean layers, a curve per policy. Right: where the examples leave, per policy, at the
    threshold that comes closest to half of the layers."""
    plt = pyplot()
    if plt is None:
        return
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(9, 3.6))
    policies = list(dict.fromkeys(row["policy"] for row in sweep))
    for i, policy in enumerate(policies):
        rows = sorted((row for row in sweep if row["policy"] == policy), key=lambda row: np.mean(row["layers"]))
        curve.plot([np.mean(row["layers"]) for row in rows], [row["score"] for row in rows], marker="o", markersize=4,
                   label=policy)
        half = min(rows, key=lambda row: abs(np.mean(row["layers"]) - num_layers / 2))
        share = 100 * np.bincount(half["layers"], minlength=num_layers + 1)[1:] / len(half["layers"])
        bars.bar(np.arange(1, num_layers + 1) + 0.27 * (i - (len(policies) - 1) / 2), share, 0.25,
                 label=f"{policy} {half['threshold']:g}")
    curve.set(xlabel="mean layers run", ylabel="dev score")
    bars.set(xlabel="exit on layer", ylabel="examples that leave there (%)", xticks=range(1, num_layers + 1))
    for axis in (curve, bars):
        axis.legend(fontsize=8)
    save_figure(plt, figure, path)


def tsne_figure(path, models, layer, split, args, most=2000):
    """Draws exit `layer`'s representations of the first `most` examples and its label embeddings (paper, Figure 6).

    models: name → model, a panel each. t-SNE on cosine distance, as the losses compare them. Says so where there are
    too few points for t-SNE, or scikit-learn or matplotlib is missing.
    """
    plt = pyplot()
    if plt is None:
        return
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        print("no t-SNE: scikit-learn is missing (pip install scikit-learn)")
        return
    n = min(most, len(split.labels))
    K = len(next(iter(models.values()))["exits"][0].label_embeddings)
    perplexity = min(30, (n + K - 1) // 3)              # about as many neighbours t-SNE looks at
    if perplexity < 2:
        print(f"no t-SNE: found {n} examples and {K} label embeddings, expected at least 7 points together")
        return
    figure, axes = plt.subplots(1, len(models), figsize=(4.5 * len(models), 4), squeeze=False)
    for axis, (name, model) in zip(axes[0], models.items()):
        model.eval()
        exit_, h = model["exits"][layer - 1], []
        states = HiddenStates(model["backbone"], split, args)
        with torch.inference_mode():
            for rows in np.array_split(np.arange(n), math.ceil(n / 64)):
                hidden, mask, _ = states.batch(rows)
                h.append(exit_(hidden[layer - 1].float(), mask)[0])                     # (N, d_e)
        points = torch.cat([*h, exit_.label_embeddings.detach()]).cpu().numpy()
        at = TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=0).fit_transform(points)
        y = split.labels[:n].numpy()
        for k in range(K):
            axis.scatter(*at[:n][y == k].T, s=6, alpha=0.5, color=f"C{k}", label=f"class {k}")
            axis.scatter(*at[n + k], s=160, marker="*", color=f"C{k}", edgecolor="black", label=f"l of class {k}")
        axis.set(title=f"{name}, exit {layer}", xticks=[], yticks=[])
        axis.legend(fontsize=7)
    save_figure(plt, figure, path)
