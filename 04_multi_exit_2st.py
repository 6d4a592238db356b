"""Multi-exit BERT: an exit on every layer, so that easy samples can leave early.

The last exit is trained with the backbone, as in scripts 01–03. Two-stage training (2ST) then freezes both and trains
the exits on all layers below, with the last exit as their teacher. The frozen backbone runs once: its hidden states are
kept, if they fit, and an epoch of stage two costs seconds. Joint training (JT) and alternating training (ALT) stand
beside it.

    2ST, stage one:  L = L_ce^M                                           backbone and exit M     (paper §3.3)
    2ST, stage two:  L^m = L_ce^m + KL(softmax(logits^M/T) ‖ softmax(logits^m/T))·T²     T = 1, each exit m < M alone
    JT:              L = Σ_m L_ce^m                                       everything together
    ALT:             L_ce^M and Σ_m L_ce^m in turns, the latter last      everything together     (App. B)

    python 04_multi_exit_2st.py                                      toy task, under 2 minutes on two CPU cores
    python 04_multi_exit_2st.py --strategy 2st jt alt --exit mha linear
    python 04_multi_exit_2st.py --num_layers 3                       beside it: the first 3 layers with one exit on top
    python 04_multi_exit_2st.py --task rte --exit_lr 5e-4 --exit_seeds 5

Prints a line per epoch with the dev score of every exit, then layer × score for each way of training, and for the
first model of each what early exiting makes of it. Draws score against layer, and score against mean layers run.
"""

import itertools
import time

import torch
import torch.nn.functional as F
from torch import nn

from common import (EXITS, apply_update, autocast, distillation_loss, drop_checkpoints, early_exit_sweep,
                    epoch_batches, epoch_line, evaluate_exits, exit_facts, freeze, hidden_states, is_finished,
                    load_backbone, make_batch, make_optimizer, mean_loss, number, own_share, parse, prepare, progress,
                    read_records, report_exits, resume, run, run_folder, save_checkpoint, shared_flags, show,
                    stage_two_flags, write_record)

STRATEGIES = ("2st", "jt", "alt")


def train_backbone(strategy, kind, seed, data, args):
    """Trains backbone and last exit ("2st": its stage one), or with them all other exits ("jt", "alt").

    "first6" and the like: the first layers only, with one exit, the baseline "BERT-6L". kind: a key of EXITS.
    → model {"backbone", "exits"}, one dict per epoch for the record
    """
    # N batch size, L tokens, M layers, d backbone width, d_e exit width, K classes
    torch.manual_seed(seed)
    num_layers = args.num_layers if strategy.startswith("first") else None
    _, backbone = load_backbone(args.model, num_layers)
    M = backbone.config.num_hidden_layers
    exits = nn.ModuleList(EXITS[kind](backbone.config.hidden_size, data.num_labels)
                          for _ in range(M if strategy in ("jt", "alt") else 1))    # exits[-1] reads layer M  # NEW
    model = nn.ModuleDict({"backbone": backbone, "exits": exits}).to(args.device)
    states = hidden_states(backbone, data, args)        # for evaluation; nothing is kept while the backbone changes

    num_updates = args.epochs * len(epoch_batches(data.train, args.batch_size, seed, 0))
    optimizer, schedule = make_optimizer(model, args.lr, num_updates)
    name, state = f"{strategy}-{kind}-seed{seed}", [model, optimizer, schedule]
    records = resume(args, name, state)                 # [], unless this run was stopped
    bar = progress(f"{strategy}-{kind} seed {seed}", num_updates, len(records) / args.epochs, args)
    for epoch in range(len(records), args.epochs):
        started = time.perf_counter()
        batches = epoch_batches(data.train, args.batch_size, seed, epoch)
        losses, skipped = torch.zeros(sum(map(len, batches)), device=args.device), torch.zeros((), device=args.device)
        i = 0
        model.train()
        for update, batch in enumerate(batches, start=epoch * len(batches)):
            # Counted from the end, so that the last turn, the one that is scored, is that of all exits.
            turns_left = args.epochs - epoch if args.alternate == "epoch" else num_updates - update  # NEW
            joint = strategy == "jt" or (strategy == "alt" and turns_left % 2 == 1)  # NEW
            trained = list(exits) if joint else [exits[-1]]  # NEW
            for rows in batch:                          # one micro-batch
                inputs, y = make_batch(data.train, rows, args.device)                       # (N, L) each, (N,)
                with autocast(args):
                    hidden = backbone(**inputs, output_hidden_states=True).hidden_states    # M+1 times (N, L, d)
                    logits = [exit_(layer, inputs["attention_mask"])[1]                     # (N, K) each  # NEW
                              for exit_, layer in zip(trained, hidden[-len(trained):])]     # exit m reads hidden[m]
                loss = sum(F.cross_entropy(each.float(), y) for each in logits)
                (len(rows) / sum(map(len, batch)) * loss).backward()
                losses[i] = loss.detach()
                i += 1
            skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1])

        losses = losses.cpu()                           # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        scores = evaluate_exits(exits, states, args)
        records.append({"loss": mean_loss(losses, batches, epoch), "scores": scores[-1], "exits": scores,
                        "skipped": int(skipped), "seconds": seconds})
        save_checkpoint(args, name, state, records)
        what = {"2st": "stage one", "jt": "all exits", "alt": "all exits" if joint else "last exit"}
        if args.alternate == "step":
            what["alt"] = "every second update all exits"
        what = what.get(strategy, f"first {num_layers} layers")
        bar.write(epoch_line(f"{strategy}-{kind}", seed, args.epochs, records) + f" ({what})")
    bar.close()
    return model, records


def train_exits(model, method, seed, exit_lr, states, args):  # NEW
    """Stage two: trains exits 1 … M−1 on the frozen backbone, the last exit being their teacher.

    They share nothing that is trained, so one pass over the data trains all of them, each with its own loss, its own
    clipping and its own optimiser. method, seed: of the record, "2st-mha" with perhaps "@rate" behind it, and "stage
    one's seed.stage two's". states: what `freeze` returns. → model with M exits, one dict per epoch for the record
    """
    kind, exit_seed = method.removeprefix("2st-").split("@")[0], int(seed.split(".")[1])
    torch.manual_seed(exit_seed)
    teacher = model["exits"][-1].requires_grad_(False)
    config, K, train = model["backbone"].config, teacher.classifier.out_features, states["train"].split
    students = nn.ModuleList(EXITS[kind](config.hidden_size, K) for _ in range(config.num_hidden_layers - 1))
    exits = nn.ModuleList([*students.to(args.device), teacher])

    num_updates = args.exit_epochs * len(epoch_batches(train, args.batch_size, exit_seed, 0))
    optimizers = [make_optimizer(exit_, exit_lr, num_updates) for exit_ in students]
    name, state = f"{method}-seed{seed}", [students, *itertools.chain(*optimizers)]
    records = resume(args, name, state)
    bar = progress(f"{method} seed {seed}", num_updates, len(records) / args.exit_epochs, args)
    for epoch in range(len(records), args.exit_epochs):
        started = time.perf_counter()
        batches = epoch_batches(train, args.batch_size, exit_seed, epoch)
        losses, skipped = torch.zeros(sum(map(len, batches)), device=args.device), torch.zeros((), device=args.device)
        i = 0
        teacher.eval()
        students.train()
        for batch in batches:
            for rows in batch:
                hidden, mask, y = states["train"].batch(rows)           # layers 1 … M: (N, L, d) each, (N, L), (N,)
                with autocast(args):
                    with torch.no_grad():                               # the teacher is a constant
                        _, logits_M = teacher(hidden[-1], mask)
                    logits = [exit_(layer, mask)[1] for exit_, layer in zip(students, hidden)]      # (N, K) each
                loss = sum(F.cross_entropy(each.float(), y) + distillation_loss(each, logits_M, 1.0) for each in logits)
                (len(rows) / sum(map(len, batch)) * loss).backward()    # no exit reaches another's parameters
                losses[i] = loss.detach()
                i += 1
            for optimizer, schedule in optimizers:
                skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1])

        losses = losses.cpu()
        seconds = time.perf_counter() - started
        scores = evaluate_exits(exits, states, args)
        records.append({"loss": mean_loss(losses, batches, epoch), "scores": scores[-1], "exits": scores,
                        "skipped": int(skipped), "seconds": seconds})
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.exit_epochs, records))
    bar.close()
    return nn.ModuleDict({"backbone": model["backbone"], "exits": exits}), records


def main():
    parser = shared_flags(__doc__)
    add = parser.add_argument
    add("--strategy", nargs="+", choices=STRATEGIES, default=["2st"], help="default: 2st")
    add("--exit", nargs="+", choices=list(EXITS), default=["mha"], help="kind of exit (default: mha)")
    add("--alternate", choices=["epoch", "step"], default="epoch", help="what alt alternates (default epoch)")
    add("--num_layers", type=number(int, 1), help="also fine-tune the first n layers with one exit on top")
    stage_two_flags(parser)
    args = parse(parser)
    data = prepare(args)

    strategies = [*dict.fromkeys(args.strategy), *[f"first{args.num_layers}"] * bool(args.num_layers)]
    stage_ones = list(itertools.product(dict.fromkeys(args.exit), args.seeds, strategies))

    def runs_on(kind, seed, strategy):
        """The runs that start from one stage one, or are it. → list of (method, seed in the record, rate)"""
        if strategy != "2st":
            return [(f"{strategy}-{kind}", seed, None)]
        return [(f"2st-{kind}" + f"@{exit_lr:g}" * (len(args.exit_lr) > 1), f"{seed}.{exit_seed}", exit_lr)
                for exit_lr in args.exit_lr for exit_seed in range(args.exit_seeds)]

    def finish(method, seed, model, epochs, **more):
        if len(model["exits"]) > 1 and str(seed) in (f"{args.seeds[0]}", f"{args.seeds[0]}.0"):    # once per method
            more["early_exit"] = early_exit_sweep(model, data.dev, args)
        write_record(args, method, seed, epochs, **exit_facts(model), **more)

    for kind, seed, strategy in own_share(args, stage_ones):
        todo = [each for each in runs_on(kind, seed, strategy) if not is_finished(args, *each[:2])]
        if not todo:
            continue
        model, epochs = train_backbone(strategy, kind, seed, data, args)
        if strategy != "2st":
            finish(*todo[0][:2], model, epochs)
            continue
        states = freeze(model["backbone"], data, args)                  # once for all runs of stage two
        for method, exit_seed, exit_lr in todo:
            trained, exit_epochs = train_exits(model, method, exit_seed, exit_lr, states, args)
            finish(method, exit_seed, trained, exit_epochs, stage_one=epochs)
        del states                                                      # perhaps gigabytes
        drop_checkpoints(args, f"2st-{kind}-seed{seed}")
    records = read_records(args, [each[:2] for stage_one in stage_ones for each in runs_on(*stage_one)])
    report_exits(run_folder(args), records)


if __name__ == "__main__":
    run(main)
