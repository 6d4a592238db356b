"""The loops: what must be equal is equal, what must not happen doesn't."""

import copy
import functools
import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common import (InputError, MHAExit, add_gradients, apply_update, epoch_batches, epoch_line, evaluate, freeze,
                    glue_scores, hidden_states, load_backbone, make_batch, make_optimizer, predict, prepare, run_folder,
                    score_table)
from conftest import load_script

PILOT, EMBED, GRAD = (load_script(name) for name in ("01_pilot_gradient_angle", "02_acl_embed", "03_acl_grad"))
EXIT, CL = (load_script(name) for name in ("04_multi_exit_2st", "05_acl_cl"))
RUNS = [(PILOT, "ce"), (PILOT, "ce+scl"), (EMBED, "ce"), (EMBED, "scl"), (EMBED, "acl_embed"),
        (GRAD, "scl"), (GRAD, "acl_embed"), (GRAD, "acl"), (EXIT, "2st-mha"), (EXIT, "2st-linear"), (EXIT, "jt-mha"),
        (EXIT, "alt-mha"), (CL, "acl-cl"), (CL, "c"), (CL, "2st")]
OWN = {"angle": 90.0, "angle_every": 1, "exit_epochs": 1, "cache_gb": None, "alternate": "step"}
each_run = pytest.mark.parametrize("script, method", RUNS, ids=[f"{s.__name__[7:9]}-{m}" for s, m in RUNS])


def capture(monkeypatch, script):
    """Notes each update's gradients and rate before it is applied, and keeps the trained weights. → dict"""
    seen = {"gradients": [], "rates": [], "weights": None}

    def spy(optimizer, schedule):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen["gradients"].append([None if p.grad is None else p.grad.clone() for p in parameters])
        seen["rates"].append(schedule.get_last_lr()[0])
        skipped = apply_update(optimizer, schedule)
        seen["weights"] = [p.detach().clone() for p in parameters]
        return skipped
    monkeypatch.setattr(script, "apply_update", spy)
    monkeypatch.setattr(script, "evaluate", lambda *_: {"score": 0.0}, raising=False)       # dev doesn't matter there
    return seen


def train_whole(script, method, seed, data, args, stage_two=True):
    """One run with any script's method, both stages where there are two. → its records"""
    if script is EXIT:
        strategy, kind = method.split("-")
        model, records = EXIT.train_backbone(strategy, kind, seed, data, args)
        if strategy == "2st" and stage_two:
            states = freeze(model["backbone"], data, args)
            records += EXIT.train_exits(model, method, f"0.{seed}", args.lr, states, args)[1]
        return records
    if script is CL:
        model, records = CL.train_backbone(CL.LADDER[method].stage_one, args.lam, seed, data, args)
        if stage_two:
            states = freeze(model["backbone"], data, args)
            records += CL.train_exits(model, method, f"0.{seed}", args.lr, states, args)[1]
        return records
    return script.train(method, seed, data, args)


def without_seconds(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@each_run
def test_17_rows_batch_16_and_the_same_numbers_twice(settings, script, method):
    """The last batch is a single row; the same seed gives the same numbers."""
    args = settings("--limit", "17", "--batch_size", "16", "--epochs", "1", **OWN)
    data = prepare(args)
    data = data._replace(dev=data.train)            # the 800 of dev would take longer than the training
    first, second = (train_whole(script, method, 3, data, args) for _ in range(2))
    assert without_seconds(first) == without_seconds(second)
    assert len(first) == (2 if script is CL or method.startswith("2st-") else 1)
    for record in first:
        assert np.isfinite(record["loss"]) and record["skipped"] == 0
        assert all(len(angles) == 2 for angles in record.get("angles", {}).values())


@each_run
def test_no_tensor_is_left_behind(monkeypatch, settings, script, method):
    """As many live tensors after update 5 as after update 30 (stage two has its own test)."""
    args = settings("--limit", "62", "--batch_size", "2", "--epochs", "1",
                    **{**OWN, "angle_every": 5, "alternate": "epoch"})
    data, live = prepare(args), []

    def count(optimizer, schedule):
        skipped = apply_update(optimizer, schedule)
        live.append(0)
        if len(live) in (5, 30):
            gc.collect()
            live[-1] = sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())
        return skipped
    monkeypatch.setattr(script, "apply_update", count)
    monkeypatch.setattr(script, "evaluate", lambda *_: {"score": 0.0}, raising=False)
    monkeypatch.setattr(script, "evaluate_exits", lambda *_: [{"score": 0.0}], raising=False)
    train_whole(script, method, 0, data, args, stage_two=False)
    assert live[4] == live[29] > 0


def test_five_micro_batches_three_updates(monkeypatch, settings):
    """150 rows in batches of 64: micro-batches of 32, 32, 32, 32, 22; each update's gradient is its rows' mean."""
    args = settings("--limit", "150", "--batch_size", "64", "--epochs", "2", "--lr", "1e-9", angle=90.0)
    data, seen = prepare(args), capture(monkeypatch, GRAD)
    monkeypatch.setattr(GRAD, "MHAExit", functools.partial(MHAExit, dropout=0.0))
    records = GRAD.train("ce", 0, data, args)
    assert len(seen["rates"]) == 6 and len(records[0]["angles"]["all"]) == 5
    assert min(seen["rates"]) > 0

    torch.manual_seed(0)
    model = nn.ModuleDict({"backbone": load_backbone("tiny")[1], "exit": MHAExit(64, 2, dropout=0.0)})
    parameters = [p for group in make_optimizer(model, 1, 1)[0].param_groups for p in group["params"]]
    for batch, got in zip(epoch_batches(data.train, 64, 0, 0), seen["gradients"]):
        inputs, y = make_batch(data.train, np.concatenate(batch), args.device)
        _, logits = model["exit"](model["backbone"](**inputs).last_hidden_state, inputs["attention_mask"])
        wanted = torch.autograd.grad(F.cross_entropy(logits, y), parameters, allow_unused=True)
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("num_updates", [1, 2, 3, 9, 10, 100, 3120])
def test_rate(num_updates):
    """Climbs, reaches the peak, falls; above 0 at the first and the last update, 0 only after it."""
    optimizer, schedule = make_optimizer(nn.Linear(2, 2), 0.5, num_updates)
    rates = []
    for _ in range(num_updates):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert min(rates) > 0 and max(rates) == 0.5 and schedule.get_last_lr()[0] == 0
    peak = rates.index(0.5)
    assert peak == max(1, round(num_updates / 10)) - 1
    assert rates[:peak + 1] == sorted(rates[:peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)


def test_weight_decay_spares_biases_and_layer_norm():
    model = nn.ModuleDict({"linear": nn.Linear(2, 3), "norm": nn.LayerNorm(3)})
    decayed, spared = make_optimizer(model, 1.0, 1)[0].param_groups
    assert decayed["weight_decay"] == 0.01 and decayed["params"] == [model["linear"].weight]
    assert spared["weight_decay"] == 0 and len(spared["params"]) == 3


def test_gate_closed_is_cross_entropy_and_gate_open_is_acl_embed(monkeypatch, settings):
    """--angle 0 discards every batch: the weights of "ce". --angle 180 discards none: those of "acl_embed"."""
    flags = ("--limit", "96", "--batch_size", "48", "--epochs", "1", "--lam", "0.5")

    def weights(method, angle):
        args, seen = settings(*flags, angle=angle), capture(monkeypatch, GRAD)
        GRAD.train(method, 0, prepare(args), args)
        return torch.cat([w.flatten() for w in seen["weights"]])
    ce, embed = weights("ce", 90.0), weights("acl_embed", 90.0)
    assert (ce - embed).abs().max() > 1e-3
    torch.testing.assert_close(weights("acl", 0.0), ce, rtol=0, atol=1e-4)      # AdamW magnifies rounding where a
    torch.testing.assert_close(weights("acl", 180.0), embed, rtol=0, atol=1e-4)     # gradient is almost 0


def test_looking_at_the_angle_changes_nothing(monkeypatch, settings):
    """Two backward passes combined by hand give what one backward pass of the sum gives."""
    gradients = []
    for every in (1, 1000):
        args = settings("--limit", "128", "--epochs", "1", "--lam", "0.3", angle_every=every)
        seen = capture(monkeypatch, EMBED)
        records = EMBED.train("acl_embed", 0, prepare(args), args)
        gradients.append(torch.cat([g.flatten() for g in seen["gradients"][1] if g is not None]))
    assert records[0]["angles"]["all"][1:] == [None] * 3
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-4)


def test_model_a_is_the_ce_row(settings):
    """Script 01's model A and script 02's "ce" are one and the same training."""
    args = settings("--limit", "96", "--epochs", "1", angle_every=1)
    data = prepare(args)
    a, ce = PILOT.train("ce", 0, data, args)[0], EMBED.train("ce", 0, data, args)[0]
    assert a["loss"] == pytest.approx(ce["loss"], abs=1e-6) and a["scores"] == ce["scores"]
    np.testing.assert_allclose(a["angles"]["all"], ce["angles"]["all"], atol=0.01)


def test_a_parameter_that_one_loss_does_not_reach():
    """It counts as zeros there, and keeps the main gradient when the contrastive term is discarded."""
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    g = torch.tensor([1.0, 2.0])
    discarded = torch.tensor(0.0)
    add_gradients([p, q], (1 - discarded, [g, g]), (discarded, [g, None]))
    assert p.grad.tolist() == q.grad.tolist() == [1.0, 2.0]
    add_gradients([p, q], (0.5, [None, g]), (0.25, [g, None]))
    assert p.grad.tolist() == [1.25, 2.5] and q.grad.tolist() == [1.5, 3.0]


def test_one_tensor_as_two_gradients():
    """autograd may hand out the same tensor twice; weighting one must not weight the other."""
    p, q, g = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), torch.ones(1)
    add_gradients([p, q], (0.5, [g, g]))
    add_gradients([p], (1.0, [g]))
    assert p.grad.item() == 1.5 and q.grad.item() == 0.5


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_gradient_skips_the_update(bad):
    """Weights, moments and step count stay; the next update is as if nothing had been."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    (optimizer, schedule), (other, other_schedule) = make_optimizer(model, 0.1, 10), make_optimizer(twin, 0.1, 10)

    def step(module, opt, sched, value=None):
        module(torch.ones(1, 3)).square().sum().backward()
        if value is not None:
            module.weight.grad[1, 1] = value
        return apply_update(opt, sched).item()
    assert step(model, optimizer, schedule) == step(twin, other, other_schedule) == 0
    assert step(model, optimizer, schedule, bad) == 1
    assert torch.equal(model.weight, twin.weight)
    other_schedule.step()
    assert step(model, optimizer, schedule) == step(twin, other, other_schedule) == 0
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)


def test_a_non_finite_gradient_is_counted_and_never_kept(monkeypatch, settings):
    """One batch's contrastive gradient is nan, its loss isn't: the update is skipped, counted, and in neither share."""
    args = settings("--limit", "96", "--epochs", "1", angle=90.0)
    real, calls = GRAD.supervised_contrastive_loss, []

    def sometimes(h, *arguments):
        calls.append(1)
        blown_up = (h * 0).sum().sqrt() if len(calls) == 2 else 0       # 0, and its slope is infinite
        return real(h, *arguments) + blown_up
    monkeypatch.setattr(GRAD, "supervised_contrastive_loss", sometimes)
    seen = capture(monkeypatch, GRAD)
    record = GRAD.train("acl", 0, prepare(args), args)[0]
    assert record["skipped"] == 1 and record["angles"]["all"][1] is None
    assert record["angles"]["all"][0] is not None and record["angles"]["all"][2] is not None
    assert all(w.isfinite().all() for w in seen["weights"])
    assert np.isfinite(record["loss"])
    assert "1 updates skipped" in epoch_line("acl", 0, args.epochs, [record])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("script, method", [(PILOT, "ce+scl"), (EMBED, "acl_embed"), (GRAD, "acl"), (CL, "acl-cl")])
def test_a_non_finite_loss_stops_the_run(monkeypatch, settings, script, method, bad):
    """The message names the epoch, the update and the batch's examples, counted from 1; no checkpoint of that epoch."""
    args = settings("--limit", "120", "--epochs", "2", "--batch_size", "40", **OWN)
    real, calls = script.supervised_contrastive_loss, []

    def sometimes(*arguments):
        calls.append(1)
        return real(*arguments) * (bad if len(calls) == 10 else 1)      # 6 micro-batches an epoch: the fourth of 2
    monkeypatch.setattr(script, "supervised_contrastive_loss", sometimes)
    data = prepare(args)
    rows = [rows for batch in epoch_batches(data.train, 40, 0, 1) for rows in batch][3]
    with pytest.raises(InputError) as error:
        train_whole(script, method, 0, data, args, stage_two=False)
    message = str(error.value)
    assert f"epoch 2, update 5: found loss {bad}" in message and "--lr" in message
    assert "examples " + ", ".join(map(str, rows + 1)) in message
    args.fresh = False
    checkpoint = torch.load(next(run_folder(args).glob("*.checkpoint.pt")), weights_only=True)
    assert len(checkpoint["records"]) == 1


def test_evaluation(settings):
    """Same predictions at any batch size, in the order of the split; dropout is off, whatever was on before."""
    args = settings("--limit", "50")
    data = prepare(args)
    torch.manual_seed(0)
    model = nn.ModuleDict({"backbone": load_backbone("tiny")[1], "exit": MHAExit(64, 2)})
    states = hidden_states(model.eval()["backbone"], data, args)
    inputs, _ = make_batch(data.train, np.arange(50), args.device)
    with torch.no_grad():
        logits = model["exit"](model["backbone"](**inputs).last_hidden_state, inputs["attention_mask"])[1]
    model["exit"].classifier.bias.data -= logits.mean(dim=0)            # so that both classes are predicted
    by_size = [predict([model["exit"]], states["train"], batch_size=size)[0] for size in (1, 3, 10, 64)]
    assert all((predictions == by_size[0]).all() for predictions in by_size) and set(by_size[0]) == {0, 1}
    wanted = glue_scores("toy", predict([model["exit"]], states["dev"])[0], data.dev.labels)
    assert evaluate(model.train(), data, args) == wanted
    assert not any(module.training for part in model.values() for module in part.modules())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_roberta_trains(settings, roberta_dir, precision):
    """Every script's method on another family, in both precisions."""
    args = settings("--limit", "40", "--epochs", "1", "--model", str(roberta_dir), "--max_length", "40",
                    "--precision", precision, **OWN)
    data = prepare(args)
    data = data._replace(dev=data.train)
    for script, method in ((PILOT, "ce+scl"), (EMBED, "acl_embed"), (GRAD, "acl"), (EXIT, "2st-linear"),
                           (EXIT, "jt-mha"), (CL, "acl-cl"), (CL, "d")):
        for record in train_whole(script, method, 0, data, args):
            assert np.isfinite(record["loss"]) and record["skipped"] == 0


def test_score_table():
    """Last epoch, not the best; the spread over seeds; shares among the angles that exist."""
    def run(seed, scores, angles):
        return {"method": "acl", "seed": seed, "epochs": [
            {"scores": {"accuracy": s, "score": s}, "angles": {"all": angles}, "seconds": 30} for s in scores]}
    table = score_table([run(0, [80, 70], [100, 80, None]), run(1, [60, 72], [100, 100, 80])], threshold=95)
    assert [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]] == [
        "acl", "71.0 ± 1.4", "76.0 ± 5.7", "58.3 ± 11.8", "58.3 ± 11.8", "1.00 ± 0.00", "2"]
