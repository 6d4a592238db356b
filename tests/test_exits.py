"""Multi-exit BERT: stage two, the frozen hidden states, joint and alternating training, ACL-CL, early exit."""

import functools
import gc
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import common
from common import (EXITS, POLICIES, HiddenStates, InputError, MHAExit, early_exit, early_exit_sweep, early_exit_table,
                    entropy, epoch_batches, evaluate_exits, exit_facts, freeze, full_model, glue_scores, hidden_states,
                    layer_table, load_backbone, load_model, make_batch, predict, prepare, save_model,
                    supervised_contrastive_loss, toy_examples, tsne_figure)
from conftest import ROOT, load_script
from test_training import capture

EXIT, CL = load_script("04_multi_exit_2st"), load_script("05_acl_cl")
OWN = {"exit_epochs": 1, "cache_gb": None, "alternate": "epoch", "angle": 90.0}
SAVED = {"task": "toy", "columns": ["sentence"], "max_length": 128}         # what --save notes beside exit and labels


@pytest.fixture
def tiny(settings):
    """tiny("--limit", "64", …) → args, data, model after its backbone was drawn (not trained), one exit on it."""
    def make(*flags, **own):
        args = settings(*flags, **{**OWN, **own})
        data = prepare(args)
        torch.manual_seed(1)
        _, backbone = load_backbone(args.model)
        exits = nn.ModuleList([MHAExit(backbone.config.hidden_size, data.num_labels)])
        return args, data, nn.ModuleDict({"backbone": backbone, "exits": exits})
    return make


def multi_exit(backbone, kind="mha"):
    """A model with an untrained exit on each layer, in evaluation mode."""
    torch.manual_seed(0)
    exits = nn.ModuleList(EXITS[kind](backbone.config.hidden_size, 2) for _ in range(backbone.config.num_hidden_layers))
    return nn.ModuleDict({"backbone": backbone, "exits": exits}).eval()


def all_logits_of(model, inputs):
    """Every exit's logits (M, N, K), from the backbone's own hidden states."""
    with torch.no_grad():
        hidden = model["backbone"](**inputs, output_hidden_states=True).hidden_states
        return torch.stack([exit_(hidden[m], inputs["attention_mask"])[1] for m, exit_ in enumerate(model["exits"], 1)])


def diverse(model, inputs):
    """Makes the exits sure of some samples and unsure of others, and of different opinions. → model"""
    for exit_, logits in zip(model["exits"], all_logits_of(model, inputs)):
        scale = 2 / logits.std(dim=0).mean()
        exit_.classifier.weight.data *= scale
        exit_.classifier.bias.data = -scale * logits.mean(dim=0)
    return model


def state(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


# ------------------------------------------------------------------------------------------- layers and exits

@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("size", [1, 7])
@torch.no_grad()
def test_layer_by_layer_equals_the_backbone(settings, roberta_dir, family, size):
    """Exit m is given hidden_states[m], in a padded batch, whichever way the layers are run."""
    args = settings("--limit", "40", *(["--model", str(roberta_dir), "--max_length", "40"] * (family == "roberta")))
    data = prepare(args)
    torch.manual_seed(0)
    model = multi_exit(load_backbone(args.model)[1])
    M = model["backbone"].config.num_hidden_layers
    rows = np.arange(size)
    inputs, _ = make_batch(data.train, rows, args.device)
    mask = inputs["attention_mask"].bool()
    assert size == 1 or not mask.all()
    wanted = model["backbone"](**inputs, output_hidden_states=True).hidden_states
    assert len(wanted) == M + 1 and len(model["exits"]) == M

    seen = {}
    for m, exit_ in enumerate(model["exits"], start=1):
        exit_.register_forward_hook(lambda module, given, result, m=m: seen.__setitem__(m, given[0].clone()))
    early_exit(model, inputs, "patience", M)                        # never leaves: M+1 equal predictions are needed
    for m in range(1, M + 1):
        torch.testing.assert_close(seen[m][mask], wanted[m][mask], rtol=0, atol=1e-5)
    for place in (None, torch.device("cpu")):                       # run for the batch, or read from the store
        states = HiddenStates(model["backbone"], data.train, args, place)
        hidden, its_mask, y = states.batch(rows)
        assert len(hidden) == M and torch.equal(its_mask, mask) and torch.equal(y, data.train.labels[rows])
        for m in range(1, M + 1):
            torch.testing.assert_close(hidden[m - 1][mask], wanted[m][mask], rtol=0, atol=1e-5)


def test_each_exit_is_scored_on_its_layer(tiny):
    args, data, model = tiny("--limit", "40")
    inputs, _ = make_batch(data.train, np.arange(40), args.device)
    model = diverse(multi_exit(model["backbone"]), inputs)
    states = hidden_states(model["backbone"], data, args)
    wanted = all_logits_of(model, inputs).argmax(dim=2).numpy()
    assert (predict(model["exits"], states["train"]) == wanted).all()
    assert (predict(model["exits"][-1:], states["train"])[0] == wanted[-1]).all()       # one exit: on the last layer
    assert len({tuple(p) for p in wanted}) == 6                     # the layers differ, so a shift by one would show


def test_truncated_backbone(settings):
    """--num_layers n is the first n layers of the same backbone."""
    torch.manual_seed(0)
    _, whole = load_backbone("tiny")
    torch.manual_seed(0)
    _, first = load_backbone("tiny", 2)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        wanted = whole.eval()(input_ids=ids, output_hidden_states=True).hidden_states[2]
        torch.testing.assert_close(first.eval()(input_ids=ids).last_hidden_state, wanted)


# -------------------------------------------------------------------------------------------------- stage two

def slow_stage_two(m, model, data, args, seed, lr, cross_layer=False):
    """Trains exit m alone, from the definition, with the backbone run for each batch. → its weights"""
    torch.manual_seed(seed)
    exits = [MHAExit(64, 2, dropout=0.0) for _ in range(5)]
    exit_, teacher, backbone = exits[m - 1], model["exits"][-1].eval(), model["backbone"].eval()
    decay = [p for name, p in exit_.named_parameters() if "bias" not in name]
    spared = [p for name, p in exit_.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}])
    batches = epoch_batches(data.train, args.batch_size, seed, 0)
    warmup, total = max(1, round(len(batches) / 10)), len(batches)
    for done, batch in enumerate(batches):
        inputs, y = make_batch(data.train, np.concatenate(batch), args.device)
        with torch.no_grad():
            hidden = backbone(**inputs, output_hidden_states=True).hidden_states
            h_M, logits_M = teacher(hidden[6], inputs["attention_mask"])
        h, logits = exit_(hidden[m], inputs["attention_mask"])
        p = logits_M.softmax(1)
        main = F.cross_entropy(logits, y) + (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
        if cross_layer:
            two = torch.arange(2)
            l, l_M = exit_.classifier.weight, teacher.classifier.weight.detach()
            term = supervised_contrastive_loss(torch.cat([h, l, h_M, l_M]), torch.cat([y, two, y, two]), args.tau)
            flat = [torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(
                exit_.parameters(), torch.autograd.grad(loss, list(exit_.parameters()), retain_graph=True,
                                                        allow_unused=True))]) for loss in (main, term)]
            lam = 0.0 if flat[0] @ flat[1] < 0 else args.lam
            main = (1 - lam) * main + lam * term
        optimizer.zero_grad()
        main.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in exit_.parameters()))
        for p in exit_.parameters():
            p.grad *= min(1.0, 1.0 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr * min((done + 1) / warmup, (total - done) / (total - warmup + 1))
        optimizer.step()
    return state(exit_)


@pytest.mark.parametrize("script, name, batch_size, limit", [
    (EXIT, "2st-mha", 32, 96), (CL, "2st", 32, 96), (CL, "a", 32, 96), (EXIT, "2st-mha", 50, 140),
    (CL, "2st", 50, 140)])
def test_exits_together_are_exits_one_at_a_time(monkeypatch, tiny, script, name, batch_size, limit):
    """Three updates of all exits in one loop against each exit alone, written out from the definition.

    Batches of 50 are two micro-batches here and one batch there: their mean is the same.
    """
    args, data, model = tiny("--limit", str(limit), "--batch_size", str(batch_size), "--lam", "0.3")
    states = freeze(model["backbone"], data, args)
    build = functools.partial(MHAExit, dropout=0.0)
    monkeypatch.setitem(EXITS, "mha", build)
    monkeypatch.setattr(script, "MHAExit", build, raising=False)
    monkeypatch.setattr(script, "evaluate_exits", lambda *_: [{"score": 0.0}])
    trained, _ = script.train_exits(model, name, "0.3", 1e-4, states, args)
    for m in range(1, 6):
        slow = slow_stage_two(m, model, data, args, 3, 1e-4, cross_layer=name == "a")
        for key, weight in trained["exits"][m - 1].state_dict().items():
            if key != "key.bias":           # softmax doesn't see it: its gradient is rounding, which AdamW magnifies
                off = (weight - slow[key]).abs()        # AdamW divides small gradients by themselves, rounding too
                assert off.mean() < 1e-7 and off.max() < 1e-5, f"exit {m} {key}: {off.mean()}, {off.max()}"


@pytest.mark.parametrize("cache_gb", [None, 0.0])
@pytest.mark.parametrize("script, name", [(EXIT, "2st-linear"), (EXIT, "2st-mha"), (CL, "acl-cl"), (CL, "d")])
def test_the_frozen_stay_frozen(tiny, roberta_dir, script, name, cache_gb):
    """Backbone and last exit are bit-identical after stage two; the backbone has dropout, which must be off."""
    args, data, _ = tiny("--limit", "48", "--model", str(roberta_dir), "--max_length", "40", cache_gb=cache_gb)
    _, backbone = load_backbone(args.model)
    kind = EXITS["linear" if name == "2st-linear" else "mha"]
    model = nn.ModuleDict({"backbone": backbone, "exits": nn.ModuleList([kind(32, 2)])}).train()
    before = state(model)
    states = freeze(backbone, data, args)
    first, _, _ = states["train"].batch(np.arange(9))
    trained, records = script.train_exits(model, name, "0.0", 1e-2, states, args)
    second, _, _ = states["train"].batch(np.arange(9))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    after = trained.state_dict()
    for key, weight in before.items():
        assert torch.equal(after[key.replace("exits.0.", "exits.2.")], weight), key
    frozen = [*backbone.parameters(), *trained["exits"][-1].parameters()]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    assert len(trained["exits"]) == len(records[0]["exits"]) == 3
    torch.manual_seed(0)
    for exit_ in trained["exits"][:-1]:                 # and the others do learn
        assert not torch.equal(exit_.classifier.weight, kind(32, 2).classifier.weight)


def test_three_classes(tiny):
    """K = 3 all the way: exits, ACL-CL with gates, the sweep."""
    args, data, _ = tiny("--limit", "48", exit_epochs=2)
    labels = [torch.arange(len(split.labels)) % 3 for split in (data.train, data.dev)]
    data = data._replace(train=data.train._replace(labels=labels[0]), dev=data.train._replace(labels=labels[0]),
                         label_names=("a", "b", "c"))
    model, _ = CL.train_backbone("acl", 0.5, 0, data, args)
    trained, records = CL.train_exits(model, "acl-cl", "0.0", 1e-3, freeze(model["backbone"], data, args), args)
    assert [exit_.label_embeddings.shape for exit_ in trained["exits"]] == [(3, 64)] * 6
    assert np.isfinite(records[-1]["loss"]) and len(records[-1]["exits"]) == 6
    sweep = early_exit_sweep(trained, data.dev, args, timed=1)
    assert all(0 <= row["score"] <= 100 and len(row["layers"]) == 48 for row in sweep)


def test_cached_or_run_again(capsys, tiny):
    """Same scores, same losses; with the cache an epoch never calls the backbone, without it once per batch."""
    results, calls = [], []
    for cache_gb in (None, 0.0):
        args, data, model = tiny("--limit", "100", cache_gb=cache_gb, exit_epochs=2)
        states = freeze(model["backbone"], data, args)
        said = capsys.readouterr().out
        assert re.search(r"hidden states: [\d,]+ tokens × 6 layers × 64 × \d bytes = 0.0\d GB", said)
        assert ("kept on cpu" in said) == (cache_gb is None)
        count = []
        model["backbone"].register_forward_hook(lambda *_: count.append(1))
        _, records = EXIT.train_exits(model, "2st-mha", "0.0", 1e-3, states, args)
        results.append(records)
        calls.append(len(count))
    assert calls == [0, 2 * (4 + 13)]                   # 2 epochs: 4 batches of train, 13 of the 800 dev examples
    for one, other in zip(*results):
        assert [e["score"] for e in one["exits"]] == [e["score"] for e in other["exits"]]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


def test_stored_states_are_the_backbones(tiny):
    """Row by row, whatever else is in the batch; in bf16 to its precision."""
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.05)):
        args, data, model = tiny("--limit", "70", "--precision", precision)
        states = freeze(model["backbone"], data, args)["train"]
        assert states.stored.shape == (6, int(data.train.lengths.sum()), 64)
        assert states.stored.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
        hidden, mask, y = states.batch(np.array([69, 0, 31]))
        for row, i in enumerate((69, 0, 31)):
            with torch.no_grad():
                wanted = model["backbone"](input_ids=data.train.inputs["input_ids"][i][None],
                                           output_hidden_states=True).hidden_states
            for m in range(6):
                torch.testing.assert_close(hidden[m][row][mask[row]].float(), wanted[m + 1][0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("script, name", [(EXIT, "2st-mha"), (CL, "acl-cl"), (CL, "c")])
def test_no_tensor_is_left_behind(monkeypatch, tiny, script, name):
    """As many live tensors at batch 5 of stage two as at batch 30."""
    args, data, model = tiny("--limit", "70", "--batch_size", "2")
    states, live, real = freeze(model["backbone"], data, args), [], HiddenStates.batch

    def count(self, rows):
        live.append(0)
        if len(live) in (5, 30):
            gc.collect()
            live[-1] = sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())
        return real(self, rows)
    monkeypatch.setattr(HiddenStates, "batch", count)
    monkeypatch.setattr(script, "evaluate_exits", lambda *_: [{"score": 0.0}])
    script.train_exits(model, name, "0.0", 1e-3, states, args)
    assert live[4] == live[29] > 0


# ----------------------------------------------------------------------------------- joint and alternating

def loss_by_hand(model, exits, data, rows, args):
    inputs, y = make_batch(data.train, rows, args.device)
    hidden = model["backbone"](**inputs, output_hidden_states=True).hidden_states
    return sum(F.cross_entropy(model["exits"][m - 1](hidden[m], inputs["attention_mask"])[1], y) for m in exits)


@pytest.mark.parametrize("strategy, alternate, per_update", [
    ("jt", "epoch", ["all", "all", "all", "all"]), ("alt", "epoch", ["last", "last", "all", "all"]),
    ("alt", "step", ["last", "all", "last", "all"]), ("alt", "epoch", ["all", "all", "last", "last", "all", "all"])])
def test_joint_and_alternating_by_hand(monkeypatch, capsys, settings, strategy, alternate, per_update):
    """The gradients of each update, against losses written out; and what is printed about whose turn it was."""
    epochs = len(per_update) // 2
    args = settings("--limit", "64", "--epochs", str(epochs), "--lr", "1e-9", **{**OWN, "alternate": alternate})
    data, seen = prepare(args), capture(monkeypatch, EXIT)
    monkeypatch.setattr(EXIT, "evaluate_exits", lambda *_: [{"score": 0.0}])
    monkeypatch.setitem(EXITS, "mha", functools.partial(MHAExit, dropout=0.0))
    trained, records = EXIT.train_backbone(strategy, "mha", 0, data, args)
    assert len(trained["exits"]) == 6
    batches = [batch for epoch in range(epochs) for batch in epoch_batches(data.train, 32, 0, epoch)]
    parameters = [p for group in common.make_optimizer(trained, 1, 1)[0].param_groups for p in group["params"]]
    losses = []
    for batch, who, got in zip(batches, per_update, seen["gradients"], strict=True):
        loss = loss_by_hand(trained, range(1, 7) if who == "all" else [6], data, batch[0], args)
        losses.append(loss.item())
        for g, w in zip(got, torch.autograd.grad(loss, parameters, allow_unused=True)):
            assert (g is None) == (w is None)
            if g is not None:
                torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-5)
    assert [r["loss"] for r in records] == pytest.approx(np.reshape(losses, (-1, 2)).mean(axis=1), abs=1e-4)
    printed = re.findall(r"s \((.*)\)$", capsys.readouterr().out, re.MULTILINE)
    assert printed == (["every second update all exits"] * 2 if alternate == "step" else
                       ["all exits" if who == "all" else "last exit" for who in per_update[::2]])


# ------------------------------------------------------------------------------------------------- ACL-CL

def test_ladder_objectives():
    """What each rung minimises, on the losses of one batch: the rows of its contrastive term, computed here anew."""
    torch.manual_seed(0)
    h, h_M, l, l_M = torch.randn(6, 8), torch.randn(6, 8), torch.randn(2, 8), torch.randn(2, 8)
    y, classes = torch.tensor([0, 1, 1, 0, 1, 1]), torch.arange(2)
    rows = {"scl": ([h], [y]), "acl_embed": ([h, l], [y, classes]),
            "acl_cl": ([h, l, h_M, l_M], [y, classes, y, classes])}
    wanted = {"acl-cl": ("acl", "acl_cl", True), "a": ("ce", "acl_cl", True), "b": ("ce", "acl_embed", True),
              "c": ("ce", "acl_embed", False), "d": ("ce", "scl", False), "2st": ("ce", None, False)}
    assert {name: tuple(variant)[:3] for name, variant in CL.LADDER.items()} == wanted
    for kind, (parts, labels) in rows.items():
        got = CL.contrastive_term(kind, h, l, y, 0.5, h_M, l_M)
        z = F.normalize(torch.cat(parts).double(), dim=1)
        n, label, total = len(z), torch.cat(labels), 0.0
        for i in range(n):
            others = [a for a in range(n) if a != i]
            bottom = sum(math.exp(z[i] @ z[a] / 0.5) for a in others)
            same = [a for a in others if label[a] == label[i]]
            total -= sum(math.log(math.exp(z[i] @ z[a] / 0.5) / bottom) for a in same) / len(same) / n
        assert got.item() == pytest.approx(total, abs=1e-5), kind


@pytest.mark.parametrize("name", list(CL.LADDER))
def test_the_loss_of_a_rung_is_what_its_name_says(monkeypatch, tiny, name):
    """The recorded loss of the first batch: (1−λ)·Σ main + λ·Σ contrast, with the rung's own contrast."""
    args, data, model = tiny("--limit", "32", "--lam", "0.4", "--lr", "1e-9")
    monkeypatch.setattr(CL, "MHAExit", functools.partial(MHAExit, dropout=0.0))
    states = freeze(model["backbone"], data, args)
    trained, records = CL.train_exits(model, name, "0.0", 1e-12, states, args)
    hidden, mask, y = states["train"].batch(epoch_batches(data.train, 32, 0, 0)[0][0])
    main = contrast = 0
    with torch.no_grad():
        h_M, logits_M = trained["exits"][-1](hidden[-1], mask)
        for exit_, layer in zip(trained["exits"][:-1], hidden):
            h, logits = exit_(layer, mask)
            main += F.cross_entropy(logits, y)
            main += F.kl_div(logits.log_softmax(1), logits_M.softmax(1), reduction="batchmean")
            l, l_M, two = exit_.classifier.weight, trained["exits"][-1].classifier.weight, torch.arange(2)
            rows, labels = {"acl_cl": ([h, l, h_M, l_M], [y, two, y, two]), "acl_embed": ([h, l], [y, two]),
                            "scl": ([h], [y]), None: ([], [])}[CL.LADDER[name].contrast]
            if rows:
                contrast += supervised_contrastive_loss(torch.cat(rows), torch.cat(labels), 0.5)
    lam = 0.4 if CL.LADDER[name].contrast else 0.0
    assert records[0]["loss"] == pytest.approx(float((1 - lam) * main + lam * contrast), abs=1e-4)
    angles = [angle for each in records[0]["angles"].values() for angle in each]
    assert len(angles) == 5 and all((angle is not None) == CL.LADDER[name].gate for angle in angles)


def test_teacher_equal_to_the_student_stays_finite():
    """Every row twice: the loss, and its gradients, are finite; nothing flows into the teacher's rows."""
    torch.manual_seed(0)
    h, l = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    h_M, l_M = h.detach().clone().requires_grad_(), l.detach().clone().requires_grad_()
    loss = CL.contrastive_term("acl_cl", h, l, torch.tensor([0, 1, 2, 0, 1]), 0.05, h_M, l_M)
    loss.backward()
    assert loss.isfinite() and h.grad.isfinite().all() and l.grad.isfinite().all()
    assert h_M.grad is None and l_M.grad is None


@pytest.mark.parametrize("which", [1, 5])
def test_one_exits_conflict_leaves_the_others_alone(monkeypatch, tiny, which):
    """One exit's gate closes on every batch: it is trained without contrast, the others as if nothing had been."""
    monkeypatch.setattr(CL, "MHAExit", functools.partial(MHAExit, dropout=0.0))
    trained = {}
    for run, name in (("open", "a"), ("one closed", "a"), ("vanilla", "2st")):
        calls = []

        def angle(first, second):
            calls.append(1)
            return torch.tensor(170.0 if run == "one closed" and len(calls) % 5 == which % 5 else 10.0)
        monkeypatch.setattr(CL, "gradient_angle", angle)
        args, data, model = tiny("--limit", "64", "--lam", "0.5")
        model, _ = CL.train_exits(model, name, "0.0", 1e-3, freeze(model["backbone"], data, args), args)
        trained[run] = [state(exit_) for exit_ in model["exits"]]
    for m in range(1, 7):
        wanted = trained["vanilla" if m == which else "open"][m - 1]
        for key, weight in trained["one closed"][m - 1].items():
            if "key.bias" not in key:
                torch.testing.assert_close(weight, wanted[key], rtol=0, atol=1e-5 if m == which else 0)
    assert not torch.equal(trained["vanilla"][0]["down.weight"], trained["open"][0]["down.weight"])


def test_gates_closed_is_vanilla_and_two_backward_passes_serve_all(monkeypatch, tiny):
    """--angle 0 discards every contrastive term: the weights of vanilla 2ST. Two calls of autograd per batch."""
    monkeypatch.setattr(CL, "MHAExit", functools.partial(MHAExit, dropout=0.0))
    calls, real, trained = [], CL.loss_gradients, {}
    monkeypatch.setattr(CL, "loss_gradients", lambda *args, **more: (calls.append(1), real(*args, **more))[1])
    for name in ("a", "2st"):
        args, data, model = tiny("--limit", "64", "--lam", "0.5", angle=0.0)
        trained[name] = state(CL.train_exits(model, name, "0.0", 1e-3, freeze(model["backbone"], data, args), args)[0])
    assert len(calls) == 2 * 2
    for key, weight in trained["a"].items():
        if "key.bias" not in key:
            torch.testing.assert_close(weight, trained["2st"][key], rtol=0, atol=1e-5)


def test_stage_one_is_script_03(monkeypatch, settings):
    """05's stage one gives the losses, angles and scores of script 03's methods, and "ce" those of 04."""
    grad = load_script("03_acl_grad")
    args = settings("--limit", "64", "--epochs", "1", **OWN)
    data = prepare(args)
    for method in ("ce", "scl", "acl"):
        wanted, (_, got) = grad.train(method, 0, data, args), CL.train_backbone(method, args.lam, 0, data, args)
        assert got[0]["scores"] == wanted[0]["scores"]
        assert got[0]["loss"] == pytest.approx(wanted[0]["loss"], abs=1e-6)
        if method == "acl":
            assert got[0]["angles"]["all"] == pytest.approx(wanted[0]["angles"]["all"], abs=0.01)
    ce, other = CL.train_backbone("ce", 0.0, 0, data, args), EXIT.train_backbone("2st", "mha", 0, data, args)
    assert ce[1][0]["loss"] == pytest.approx(other[1][0]["loss"], abs=1e-6)
    for key, weight in ce[0].state_dict().items():
        torch.testing.assert_close(weight, other[0].state_dict()[key], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------- early exit

def slow_early_exit(all_logits, policy, threshold):
    """From the definition, one sample at a time. all_logits (M, K) → exit 1 … M"""
    M, K = all_logits.shape
    for m in range(M):
        p = np.exp(all_logits[m] - all_logits[m].max())
        p /= p.sum()
        if policy == "entropy" and -sum(x * math.log(x) for x in p if x > 0) / math.log(K) < threshold:
            return m + 1
        if policy == "confidence" and p.max() > threshold:
            return m + 1
        guesses = all_logits[:m + 1].argmax(axis=1)
        if policy == "patience" and m + 1 > threshold and len(set(guesses[m - int(threshold):])) == 1:
            return m + 1
    return M


@pytest.fixture
def ready(tiny):
    """Forty padded samples, a model with six exits, and all exits' logits. → args, data, model, logits (M, n, K)"""
    args, data, model = tiny("--limit", "40")
    inputs, _ = make_batch(data.train, np.arange(40), args.device)
    model = diverse(multi_exit(model["backbone"]), inputs)
    return args, data, model, all_logits_of(model, inputs).double().numpy()


@pytest.mark.parametrize("policy, threshold", [("entropy", 0.3), ("entropy", 0.8), ("confidence", 0.9),
                                               ("confidence", 0.7), ("patience", 1), ("patience", 3), ("patience", 0)])
@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_early_exit_at_any_batch_size(ready, policy, threshold, size):
    """Layers and logits are those of the definition, in input order, whatever the batch."""
    args, data, model, all_logits = ready
    wanted = np.array([slow_early_exit(all_logits[:, i], policy, threshold) for i in range(40)])
    for start in range(0, 40, size):
        rows = np.arange(40)[start:start + size]
        logits, layers = early_exit(model, make_batch(data.train, rows, args.device)[0], policy, threshold)
        assert layers.tolist() == wanted[rows].tolist()
        np.testing.assert_allclose(logits, all_logits[wanted[rows] - 1, rows], atol=1e-4)
    assert threshold == 0 or len(set(wanted)) > 1


def count_layers(model):
    """Notes how many samples each layer is given. → list of (layer, samples), filled as it runs"""
    seen = []
    for m, layer in enumerate(model["backbone"].encoder.layer, start=1):
        layer.register_forward_hook(lambda module, given, result, m=m: seen.append((m, len(result))))
    return seen


@pytest.mark.parametrize("policy, never, always", [("entropy", 0, 1), ("confidence", 1, 0), ("patience", 6, 0)])
def test_never_and_always(ready, policy, never, always):
    """Never: the full model's logits, bit for bit. Always: no layer above the first is run."""
    args, data, model, _ = ready
    inputs, _ = make_batch(data.train, np.arange(40), args.device)
    logits, layers = early_exit(model, inputs, policy, never)
    assert torch.equal(logits, full_model(model, inputs)) and set(layers.tolist()) == {6}
    seen = count_layers(model)
    _, layers = early_exit(model, inputs, policy, always)
    assert seen == [(1, 40)] and set(layers.tolist()) == {1}


def test_samples_that_left_are_not_computed(ready):
    """Each layer is given those samples, and only those, whose exit lies on it or above."""
    args, data, model, _ = ready
    seen = count_layers(model)
    _, layers = early_exit(model, make_batch(data.train, np.arange(40), args.device)[0], "confidence", 0.8)
    layers = layers.numpy()
    assert seen == [(m, int((layers >= m).sum())) for m in range(1, layers.max() + 1)]


def test_mean_layers_are_monotone(ready):
    args, data, model, _ = ready
    inputs, _ = make_batch(data.train, np.arange(40), args.device)
    for policy, thresholds in (("entropy", np.linspace(1, 0, 21)), ("confidence", np.linspace(0, 1, 21)),
                               ("patience", range(8))):
        means = [early_exit(model, inputs, policy, float(t))[1].float().mean().item() for t in thresholds]
        assert means == sorted(means) and means[0] == 1 and means[-1] == 6 and len(set(means)) > 3


@pytest.mark.parametrize("K", [2, 3])
def test_certain_logits(ready, K):
    """Logits of ±80: entropy is 0, not nan, and the sample leaves at exit 1."""
    certain = torch.full((4, K), -80.0)
    certain[:, 1] = 80
    assert entropy(certain).tolist() == [0] * 4
    torch.testing.assert_close(entropy(torch.zeros(2, K)), torch.ones(2))
    args, data, model, _ = ready
    model["exits"][0].classifier.weight.data.zero_()
    model["exits"][0].classifier.bias.data = torch.tensor([-80.0, 80.0])
    for policy, threshold in (("entropy", 1e-6), ("confidence", 0.999999)):
        logits, layers = early_exit(model, make_batch(data.train, np.arange(5), args.device)[0], policy, threshold)
        assert layers.tolist() == [1] * 5 and logits.argmax(1).tolist() == [1] * 5


def test_unknown_policy(ready):
    with pytest.raises(ValueError, match="entropy, patience, confidence"):
        early_exit(ready[2], {}, "guess", 1)


def test_sweep(ready):
    """Score and layers of each row are those of the definition, in the split's order; ratios are positive."""
    args, data, model, all_logits = ready
    sweep = early_exit_sweep(model, data.train, args, timed=3)
    assert [(row["policy"], row["threshold"]) for row in sweep] == [(p, t) for p, ts in POLICIES.items() for t in ts]
    for row in sweep:
        wanted = [slow_early_exit(all_logits[:, i], row["policy"], row["threshold"]) for i in range(40)]
        assert row["layers"] == wanted
        guesses = [all_logits[m - 1, i].argmax() for i, m in enumerate(wanted)]
        assert row["score"] == glue_scores("toy", guesses, data.train.labels)["score"]
        assert row["batch 1"] > 0 and row["batch 32"] > 0
    table = early_exit_table(sweep, 6).splitlines()
    assert len(table) == 2 + len(sweep) and len({len(line) for line in table}) == 1
    assert f"{np.mean(sweep[0]['layers']):.2f}" in table[2] and f"{6 / np.mean(sweep[0]['layers']):.2f}×" in table[2]


# ---------------------------------------------------------------------------------- saving, tables, figures

@pytest.mark.parametrize("kind", ["mha", "linear"])
@pytest.mark.parametrize("family", ["tiny", "roberta"])
def test_saved_and_loaded(settings, tmp_path, roberta_dir, family, kind):
    """The same logits to the bit, the tokenizer too; files in the ecosystem's own formats."""
    args = settings("--limit", "20", *(["--model", str(roberta_dir), "--max_length", "40"] * (family == "roberta")))
    data = prepare(args)
    tokenizer, backbone = load_backbone(args.model)
    model = multi_exit(backbone, kind)
    folder = tmp_path / "saved"
    save_model(folder, tokenizer, model, {"exit": kind, "label_names": ["no", "yes"], **SAVED})
    assert {"config.json", "model.safetensors", "exits.safetensors", "settings.json", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()}
    again, loaded, settings_ = load_model(folder)
    assert settings_["label_names"] == ["no", "yes"]
    assert again("the plot was not dull")["input_ids"] == tokenizer("the plot was not dull")["input_ids"]
    inputs, _ = make_batch(data.train, np.arange(20), args.device)
    for one, other in zip(early_exit(model, inputs, "confidence", 0.8), early_exit(loaded, inputs, "confidence", 0.8)):
        assert torch.equal(one, other)


def test_not_a_saved_model(tmp_path, tiny):
    args, data, model = tiny("--limit", "20")
    with pytest.raises(InputError, match="not a model that --save wrote"):
        load_model(tmp_path)
    folder = tmp_path / "saved"
    common.reserve(folder)
    save_model(folder, load_backbone("tiny")[0], multi_exit(model["backbone"]),
               {"exit": "mha", "label_names": ["a", "b"], **SAVED})
    common.reserve(folder)                              # an earlier model may be overwritten
    (folder / "settings.json").write_text(json.dumps({"exit": "linear", "label_names": ["a", "b"], **SAVED}))
    with pytest.raises(InputError, match="doesn't fit settings.json"):
        load_model(folder)
    (folder / "exits.safetensors").write_bytes(b"cut off")
    with pytest.raises(InputError, match="not a model that --save wrote"):
        load_model(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be saved there"):
        common.reserve(tmp_path / "file" / "below")
    with pytest.raises(InputError, match="found other files"):
        common.reserve(tmp_path)


def test_readme_example(settings, tmp_path, monkeypatch, capsys):
    """README's lines for one's own program run as they stand, on a model that was saved."""
    args = settings("--limit", "20")
    prepare(args)
    tokenizer, backbone = load_backbone("tiny")
    monkeypatch.chdir(tmp_path)
    save_model("my_model", tokenizer, multi_exit(backbone),
               {"exit": "mha", "label_names": ["negative", "positive"], **SAVED})
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = [block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "load_model" in block]
    assert len(code) == 1
    capsys.readouterr()
    exec(code[0], {})
    assert re.search(r"(negative|positive)", capsys.readouterr().out)


def test_layer_table():
    """Layers without an exit show a dash; what stage two leaves as it is counts once per stage one."""
    def run(method, seed, scores, layers, **more):
        return {"method": method, "seed": seed, "layers": layers, "parameters": {"backbone": 1000, "exits": 20},
                "epochs": [{"exits": [{"score": s, "f1": f1} for s in scores], "seconds": 30}], **more}
    f1 = 50
    table = layer_table([run("2st", "0.0", [60, 80], [1, 2], stage_one=[{"seconds": 90}]),
                         run("2st", "0.1", [64, 80], [1, 2], stage_one=[{"seconds": 90}]), run("first1", 0, [70], [1]),
                         run("jt", 0, [61, 79], [1, 2])]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert cells[0] == ["score", "2st", "first1", "jt"]
    assert cells[2:] == [["exit 1", "62.0 ± 2.8", "70.0", "61.0"], ["exit 2", "80.0", "–", "79.0"],
                         ["last exit: f1", "50.0", "50.0", "50.0"],
                         ["average", "71.0 ± 1.4", "–", "70.0"], ["minutes, stage one", "1.50", "0.50", "0.50"],
                         ["minutes, stage two", "0.50 ± 0.00", "–", "–"],
                         ["parameters added %", "2.00", "2.00", "2.00"], ["runs", "2", "1", "1"]]


def test_exit_facts(tiny):
    args, data, model = tiny("--limit", "20")
    facts = exit_facts(model)
    assert facts["layers"] == [6] and facts["parameters"] == {
        name: sum(p.numel() for p in model[name].parameters()) for name in ("backbone", "exits")}
    assert exit_facts(multi_exit(model["backbone"]))["layers"] == [1, 2, 3, 4, 5, 6]


def test_tsne(tiny, capsys, tmp_path):
    """A figure where there are points enough, a sentence where there aren't."""
    args, data, model = tiny("--limit", "20")
    models = {"2st": multi_exit(model["backbone"])}
    tsne_figure(tmp_path / "few.png", models, 2, data.train._replace(labels=data.train.labels[:3]), args)
    assert "no t-SNE: found 3 examples and 2 label embeddings" in capsys.readouterr().out
    assert not (tmp_path / "few.png").exists()
    tsne_figure(tmp_path / "twenty.png", models, 2, data.train, args)
    assert (tmp_path / "twenty.png").stat().st_size > 1000


def test_mnli_has_both_halves_per_exit(tiny):
    args, data, model = tiny("--limit", "20")
    other = data.train._replace(labels=1 - data.train.labels)
    args.task, data = "mnli", data._replace(dev=data.train, dev_mismatched=other)
    scores = evaluate_exits(multi_exit(model["backbone"])["exits"], hidden_states(model["backbone"], data, args), args)
    assert len(scores) == 6
    assert [s["accuracy_mismatched"] for s in scores] == pytest.approx([100 - s["accuracy"] for s in scores])


def call(monkeypatch, capsys, script, *flags):
    """Runs a script's main in this process, on a small dev set and with few thresholds. → what it printed"""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__[7:]}.py", "--device", "cpu", *flags])
    monkeypatch.setattr(common, "POLICIES", {"entropy": (0.4,), "patience": (1,), "confidence": (0.8,)})
    monkeypatch.setattr(common, "toy_examples", functools.partial(toy_examples, num_dev=100))
    monkeypatch.setattr(script, "early_exit_sweep", functools.partial(early_exit_sweep, timed=2), raising=False)
    capsys.readouterr()
    script.main()
    return capsys.readouterr().out


SMALL = ("--limit", "33", "--epochs", "1")


def test_04_with_all_its_flags(monkeypatch, capsys, tmp_path):
    """A column per strategy, kind and rate; the baseline; ± only where stage two was repeated."""
    said = call(monkeypatch, capsys, EXIT, *SMALL, "--out", str(tmp_path), "--strategy", "2st", "jt", "alt",
                "--exit", "mha", "linear", "--num_layers", "2", "--exit_lr", "1e-3", "5e-4", "--exit_seeds", "2")
    header = next(line for line in said.splitlines() if line.startswith("| score"))
    assert [cell.strip() for cell in header.split("|")[2:-1]] == [
        f"{name}-{kind}{rate}" for kind in ("mha", "linear")
        for name, rate in (("2st", "@0.001"), ("2st", "@0.0005"), ("jt", ""), ("alt", ""), ("first2", ""))]
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if line.startswith("| ")}
    assert rows["exit 1"].count("±") == 4 and rows["exit 6"].count("±") == 0
    assert len(list(tmp_path.rglob("*.json"))) == 2 * (2 * 2 + 3) and "first 2 layers" in said
    assert said.count("Early exit, ") == 2 * 4


def test_05_ablation_saving_and_loading(monkeypatch, capsys, tmp_path):
    """Six rungs from two stage ones; two pictures of t-SNE; the loaded model's scores are the saved one's."""
    said = call(monkeypatch, capsys, CL, *SMALL, "--out", str(tmp_path / "runs"), "--ablation", "--tsne", "2",
                "--save", str(tmp_path / "model"), "--exit_seeds", "2")
    assert said.count("(stage one") == 2 and said.count("hidden states:") == 2
    table = said[said.index("what changes"):].splitlines()[2:8]
    assert [line.split("|")[1].strip() for line in table] == ["acl-cl", "a", "b", "c", "d", "2st"]
    assert "0.00 ± 0.00" in table[0]
    discarded = said[said.index("batches discarded %"):].splitlines()[2:5]
    assert [line.split("|")[1].strip() for line in discarded] == ["acl-cl", "a", "b"]
    assert len(list(tmp_path.rglob("*seed0.1.json"))) == 6 and list(tmp_path.rglob("tsne-exit2.png"))
    said = call(monkeypatch, capsys, CL, "--load", str(tmp_path / "model"))
    lines = {line.split(":")[0].strip(): line.split("dev")[1] for line in said.splitlines() if ": dev " in line}
    assert lines["saved"] == lines["loaded"]
    settings_ = tmp_path / "model" / "settings.json"
    settings_.write_text(settings_.read_text().replace('"toy"', '"rte"'))
    with pytest.raises(InputError, match="trained on --task rte with the labels .*, found --task toy with "):
        call(monkeypatch, capsys, CL, "--load", str(tmp_path / "model"))


def test_05_lambda_study(monkeypatch, capsys, tmp_path):
    """λ = 0 is cross-entropy for both methods; the table's spread is that of its row; the records say which λ."""
    said = call(monkeypatch, capsys, CL, *SMALL, "--out", str(tmp_path), "--lams", "0", "1")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert rows[0] == ["score", "λ 0", "λ 1", "max − min", "seeds"] and [row[0] for row in rows[2:]] == ["scl", "acl"]
    assert rows[2][1] == rows[3][1]
    for row in rows[2:]:
        assert float(row[3]) == pytest.approx(abs(float(row[1]) - float(row[2])), abs=0.11)
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    assert sorted((r["method"], r["lam"]) for r in records) == [
        ("acl-lam0", 0), ("acl-lam1", 1), ("scl-lam0", 0), ("scl-lam1", 1)]
