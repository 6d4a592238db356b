"""Idea 3, ACL-CL: the last exit teaches the shallow ones, in the contrastive batch too.

Stage one is script 03's ACL. In stage two an exit contrasts not only its own samples and label embeddings but, beside
them, the frozen last exit's: they show it where each class should lie. Its gate is its own: where the contrastive
gradient opposes that of the main loss, over the parameters of this exit, the term is dropped for this exit.

    main^m = L_ce^m + KL(softmax(logits^M/T) ‖ softmax(logits^m/T))·T²                   T = 1     (paper §3.3)
    acl_cl^m = L_scl on 2N+2K rows (h^m, l^m, h^M, l^M), labels (y, 1…K, y, 1…K)                   (§4.4)
    λ^m = 0 if γ(∇main^m, ∇acl_cl^m) > 90° else λ
    L^m = (1−λ^m)·main^m + λ^m·acl_cl^m                                    each exit m < M alone

    python 05_acl_cl.py                                  toy task, about 2 minutes on two CPU cores
    python 05_acl_cl.py --ablation                       what each part is worth (paper §5.6)
    python 05_acl_cl.py --lams 0.005 0.01 0.02 0.1 0.5 1.0       ACL against CE+SCL over λ (Table 3)
    python 05_acl_cl.py --tsne 1                         exit 1's representations, without and with ACL (Figure 6)
    python 05_acl_cl.py --save my_model                  and then: python 05_acl_cl.py --load my_model
    python 05_acl_cl.py --task rte --exit_lr 5e-4 --exit_seeds 5

Prints a line per epoch with the dev score of every exit, then layer × score beside vanilla 2ST, the share of batches
each exit's gate dropped, and the early-exit table. Draws score against layer, and score against mean layers run.
"""

import itertools
import time
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from common import (MHAExit, add_gradients, apply_update, autocast, by_method, contrast_flags, distillation_loss,
                    drop_checkpoints, early_exit_sweep, epoch_batches, epoch_line, evaluate_exits, exit_facts,
                    exit_scores, freeze, gradient_angle, hidden_states, is_finished, load_backbone, load_flags,
                    loss_gradients, make_batch, make_optimizer, markdown_table, mean_loss, mean_std, number, own_share,
                    parse, predict_file, prepare, progress, read_records, report_exits, reserve, resume, run,
                    run_folder, save_checkpoint, save_model, score_saved, shared_flags, show, stage_two_flags,
                    supervised_contrastive_loss, task_name, to_list, tsne_figure, write_record)


# stage_one: objective of backbone and last exit; contrast: rows of an exit's contrastive term; gate: one per exit.
Variant = namedtuple("Variant", "stage_one contrast gate meaning")  # NEW
LADDER = {                      # each row keeps the changes of those before it  # NEW
    "acl-cl": Variant("acl", "acl_cl", True, "the full method"),
    "a": Variant("ce", "acl_cl", True, "stage one: cross-entropy alone"),
    "b": Variant("ce", "acl_embed", True, "… the last exit gives soft targets only: ACL-Embed per exit"),
    "c": Variant("ce", "acl_embed", False, "… no gate"),
    "d": Variant("ce", "scl", False, "… no label embeddings: SCL per exit"),
    "2st": Variant("ce", None, False, "… no contrastive term: vanilla 2ST (e)"),
}


def contrastive_term(kind, h, l, y, tau, h_M=None, l_M=None):  # NEW
    """One exit's contrastive loss, on N rows ("scl"), N+K ("acl_embed") or 2N+2K ("acl_cl"). → scalar

    h, h_M (N, d_e) and l, l_M (K, d_e): representations and label embeddings of this exit and of the last; y (N,).
    """
    rows, labels = [h], [y]
    if kind != "scl":
        rows, labels = [h, l], [y, torch.arange(len(l), device=y.device)]
    if kind == "acl_cl":                                # the last exit is looked at, not moved
        rows, labels = [*rows, h_M.detach(), l_M.detach()], labels + labels
    return supervised_contrastive_loss(torch.cat(rows), torch.cat(labels), tau)


def train_backbone(method, lam, seed, data, args):
    """Stage one: backbone and last exit, with "ce", "scl" or "acl" as in script 03.

    → model {"backbone", "exits"} with its one exit, one dict per epoch for the record
    """
    # N batch size, L tokens, M layers, d backbone width, d_e exit width, K classes
    torch.manual_seed(seed)
    _, backbone = load_backbone(args.model)
    exits = nn.ModuleList([MHAExit(backbone.config.hidden_size, data.num_labels)])
    exit_ = exits[0]
    model = nn.ModuleDict({"backbone": backbone, "exits": exits}).to(args.device)
    parameters = list(model.parameters())
    states = hidden_states(backbone, data, args)        # for evaluation; nothing is kept while the backbone changes

    num_updates = args.epochs * len(epoch_batches(data.train, args.batch_size, seed, 0))
    optimizer, schedule = make_optimizer(model, args.lr, num_updates)
    name, state = f"{method}-lam{lam:g}-seed{seed}", [model, optimizer, schedule]
    records = resume(args, name, state)                 # [], unless this run was stopped
    bar = progress(f"{method} seed {seed}", num_updates, len(records) / args.epochs, args)
    for epoch in range(len(records), args.epochs):
        started = time.perf_counter()
        batches = epoch_batches(data.train, args.batch_size, seed, epoch)
        num_micro = sum(map(len, batches))
        losses = torch.zeros(num_micro, device=args.device)
        angles = torch.full((num_micro,), torch.nan, device=args.device)
        skipped = torch.zeros((), device=args.device)
        i = 0
        model.train()
        for batch in batches:
            for rows in batch:
                inputs, y = make_batch(data.train, rows, args.device)                       # (N, L) each, (N,)
                with autocast(args):
                    hidden = backbone(**inputs).last_hidden_state                           # (N, L, d)
                    h, logits = exit_(hidden, inputs["attention_mask"])                     # (N, d_e), (N, K)
                loss = ce = F.cross_entropy(logits.float(), y)
                if method != "ce":
                    kind = "scl" if method == "scl" else "acl_embed"
                    contrast = contrastive_term(kind, h, exit_.label_embeddings, y, args.tau)
                    loss = (1 - lam) * ce + lam * contrast
                weight = len(rows) / sum(map(len, batch))
                if method == "acl":
                    g_ce = loss_gradients(ce, parameters, retain_graph=True)
                    g_contrast = loss_gradients(contrast, parameters)
                    angles[i] = angle = gradient_angle(g_ce, g_contrast)
                    lam_batch = lam * ~(angle > args.angle)
                    add_gradients(parameters, ((1 - lam_batch) * weight, g_ce), (lam_batch * weight, g_contrast))
                else:
                    (weight * loss).backward()
                losses[i] = loss.detach()
                i += 1
            skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1])

        losses = losses.cpu()                           # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        scores = evaluate_exits(exits, states, args)
        records.append({"loss": mean_loss(losses, batches, epoch), "scores": scores[-1], "exits": scores,
                        "skipped": int(skipped), "angles": {"all": to_list(angles)}, "seconds": seconds})
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.epochs, records) + f" (stage one{f', λ {lam:g}' * (method != 'ce')})")
    bar.close()
    return model, records


def train_exits(model, method, seed, exit_lr, states, args):
    """Stage two: exits 1 … M−1 on the frozen backbone, with the objective LADDER[method] and a gate per exit.

    method, seed: of the record, perhaps with "@rate" behind it, and "stage one's seed.stage two's". states: what
    `freeze` returns. → model with M exits, one dict per epoch for the record
    """
    variant = LADDER[method.split("@")[0]]  # NEW
    lam = args.lam if variant.contrast else 0.0  # NEW
    exit_seed = int(seed.split(".")[1])
    torch.manual_seed(exit_seed)
    teacher = model["exits"][-1].requires_grad_(False)
    config, K, train = model["backbone"].config, teacher.classifier.out_features, states["train"].split
    students = nn.ModuleList(MHAExit(config.hidden_size, K) for _ in range(config.num_hidden_layers - 1))
    exits = nn.ModuleList([*students.to(args.device), teacher])
    parameters = list(students.parameters())
    size = len(parameters) // len(students)             # tensors of one exit  # NEW

    num_updates = args.exit_epochs * len(epoch_batches(train, args.batch_size, exit_seed, 0))
    optimizers = [make_optimizer(exit_, exit_lr, num_updates) for exit_ in students]
    name, state = f"{method}-seed{seed}", [students, *itertools.chain(*optimizers)]
    records = resume(args, name, state)
    bar = progress(f"{method} seed {seed}", num_updates, len(records) / args.exit_epochs, args)
    for epoch in range(len(records), args.exit_epochs):
        started = time.perf_counter()
        batches = epoch_batches(train, args.batch_size, exit_seed, epoch)
        num_micro = sum(map(len, batches))
        losses, skipped = torch.zeros(num_micro, device=args.device), torch.zeros((), device=args.device)
        angles = torch.full((len(students), num_micro), torch.nan, device=args.device)  # NEW
        i = 0
        teacher.eval()
        students.train()
        for batch in batches:
            for rows in batch:
                hidden, mask, y = states["train"].batch(rows)           # layers 1 … M: (N, L, d) each, (N, L), (N,)
                with autocast(args):
                    with torch.no_grad():                               # the teacher is a constant
                        h_M, logits_M = teacher(hidden[-1], mask)
                    outputs = [exit_(layer, mask) for exit_, layer in zip(students, hidden)]    # (N, d_e), (N, K) each
                main = sum(F.cross_entropy(logits.float(), y) + distillation_loss(logits, logits_M, 1.0)
                           for _, logits in outputs)
                contrast = 0.0                                          # of "2st"
                if variant.contrast:  # NEW
                    contrast = sum(contrastive_term(variant.contrast, h, exit_.label_embeddings, y, args.tau,
                                                    h_M, teacher.label_embeddings)
                                   for exit_, (h, _) in zip(students, outputs))
                loss = (1 - lam) * main + lam * contrast  # NEW
                weight = len(rows) / sum(map(len, batch))
                if variant.gate:  # NEW
                    # The exits share no parameter, so the gradient of the sum holds each one's own gradient: two
                    # backward passes serve all of them.
                    g_main = loss_gradients(main, parameters, retain_graph=True)
                    g_contrast = loss_gradients(contrast, parameters)
                    for m in range(len(students)):
                        own = slice(m * size, (m + 1) * size)
                        angles[m, i] = angle = gradient_angle(g_main[own], g_contrast[own])
                        lam_m = lam * ~(angle > args.angle)
                        add_gradients(parameters[own], ((1 - lam_m) * weight, g_main[own]),
                                      (lam_m * weight, g_contrast[own]))
                else:
                    (weight * loss).backward()
                losses[i] = loss.detach()
                i += 1
            for optimizer, schedule in optimizers:
                skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1])

        losses = losses.cpu()
        seconds = time.perf_counter() - started
        scores = evaluate_exits(exits, states, args)
        records.append({"loss": mean_loss(losses, batches, epoch), "scores": scores[-1], "exits": scores,
                        "skipped": int(skipped), "seconds": seconds,
                        "angles": {f"exit {m + 1}": to_list(each) for m, each in enumerate(angles.cpu())}})
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.exit_epochs, records))
    bar.close()
    return nn.ModuleDict({"backbone": model["backbone"], "exits": exits}), records


def ablation_table(records):  # NEW
    """One row per rung: average over all exits, and the difference to the full method, seed by seed. → Markdown"""
    averages = {method: exit_scores(runs).mean(axis=1) for method, runs in by_method(records).items()}
    rows = []
    for method, average in averages.items():
        name, *rate = method.split("@")
        full = averages["@".join(["acl-cl", *rate])]
        rows.append([method, LADDER[name].meaning, mean_std(average), mean_std(average - full, 2), len(average)])
    return markdown_table(["method", "what changes", "average over exits", "against full", "runs"], rows)


def lambda_study(data, args):  # NEW
    """The last exit's score over λ, "scl" against "acl", stage one alone. Prints the table."""
    runs = [(f"{kind}-lam{lam:g}", seed, kind, lam) for kind in ("scl", "acl") for lam in args.lams
            for seed in args.seeds]
    for method, seed, kind, lam in own_share(args, runs):
        if not is_finished(args, method, seed):
            write_record(args, method, seed, train_backbone(kind, lam, seed, data, args)[1], lam=lam)
    records, rows = by_method(read_records(args, [each[:2] for each in runs])), []
    for kind in ("scl", "acl"):
        scores = [[record["epochs"][-1]["scores"]["score"] for record in records[f"{kind}-lam{lam:g}"]]
                  for lam in args.lams]
        means = [sum(each) / len(each) for each in scores]
        rows.append([kind, *map(mean_std, scores), f"{max(means) - min(means):.1f}", len(args.seeds)])
    print("\n" + markdown_table(["score", *(f"λ {lam:g}" for lam in args.lams), "max − min", "seeds"], rows))


def main():
    parser = shared_flags(__doc__)
    contrast_flags(parser)
    add = parser.add_argument
    add("--angle", type=number(float, 0, 180), default=90.0,
        help="discard the contrastive term where γ is over this many degrees (default 90)")
    stage_two_flags(parser)
    add("--ablation", action="store_true", help="all rungs of the ladder, not only acl-cl and 2st")
    add("--lams", type=number(float, 0, 1), nargs="+", help="instead: CE+SCL and ACL over these λ, stage one")
    add("--tsne", type=number(int, 1), metavar="LAYER", help="also draw this exit's dev representations with t-SNE")
    add("--save", metavar="DIR", help="save the first trained model of the full method")
    load_flags(parser)
    args = parse(parser)
    if sum(bool(each) for each in (args.load, args.lams, args.ablation or args.tsne or args.save)) > 1:
        parser.error("--load and --lams each stand alone, without --ablation, --tsne and --save")
    if args.world_size > 1 and (args.tsne or args.save):
        parser.error("--tsne and --save need all runs in one process: run the same command once more without torchrun")
    if args.predict:
        return predict_file(args)
    if args.load:
        return score_saved(args)
    if args.save:
        reserve(args.save)
    data = prepare(args)
    if args.lams:
        return lambda_study(data, args)

    def runs_on(stage_one, seed):
        """The runs that start from one stage one. → list of (method, seed in the record, rate of stage two)"""
        names = [name for name in (LADDER if args.ablation else ("acl-cl", "2st"))
                 if LADDER[name].stage_one == stage_one]
        return [(name + f"@{exit_lr:g}" * (len(args.exit_lr) > 1), f"{seed}.{exit_seed}", exit_lr)
                for name in names for exit_lr in args.exit_lr for exit_seed in range(args.exit_seeds)]

    stage_ones = list(itertools.product(("acl", "ce"), args.seeds))     # each trained once for all that start from it
    first = f"{args.seeds[0]}.0"                                        # seeds of the first run of each method

    def is_kept(method, exit_seed):
        """Whether --tsne or --save wants the model of a run: then it's trained, since records hold no weights."""
        wanted = ("acl-cl", "2st") if args.tsne else ("acl-cl",) if args.save else ()
        return exit_seed == first and method.split("@")[0] in wanted

    kept = {}
    for stage_one, seed in own_share(args, stage_ones):
        todo = [each for each in runs_on(stage_one, seed) if is_kept(*each[:2]) or not is_finished(args, *each[:2])]
        if not todo:
            continue
        model, epochs = train_backbone(stage_one, args.lam, seed, data, args)
        states = freeze(model["backbone"], data, args)
        for method, exit_seed, exit_lr in todo:
            trained, exit_epochs = train_exits(model, method, exit_seed, exit_lr, states, args)
            more = {"stage_one": epochs, **exit_facts(trained)}
            if exit_seed == first and method.startswith("acl-cl"):
                more["early_exit"] = early_exit_sweep(trained, data.dev, args)
            if is_kept(method, exit_seed):
                kept[method] = trained
            write_record(args, method, exit_seed, exit_epochs, **more)
        del model, states, trained                                      # perhaps gigabytes
        drop_checkpoints(args, f"{stage_one}-lam{args.lam:g}-seed{seed}")
    records = read_records(args, [each[:2] for stage_one in stage_ones for each in runs_on(*stage_one)])
    order = {name: i for i, name in enumerate(LADDER)}
    records.sort(key=lambda record: order[record["method"].split("@")[0]])

    report_exits(run_folder(args), records, args.angle)
    if args.ablation:
        print("\n" + ablation_table(records))
    if args.tsne:
        shown = {method: kept[method] for method in reversed(kept)}     # without ACL first
        tsne_figure(run_folder(args) / f"tsne-exit{args.tsne}.png", shown, args.tsne, data.dev, args)
    if args.save:
        method, model = next(iter(kept.items()))                        # the full method's is the first
        settings = {"method": method, "task": task_name(args), "label_names": data.label_names, "exit": "mha",
                    "columns": data.columns, "max_length": args.max_length,
                    "scores": [exit_["score"] for exit_ in records[0]["epochs"][-1]["exits"]]}
        save_model(args.save, load_backbone(args.model)[0], model, settings)
        print(f"\nsaved: {args.save}")


if __name__ == "__main__":
    run(main)
