"""The problem: cross-entropy and supervised contrastive learning pull a BERT in different directions.

Two models are fine-tuned, A with cross-entropy alone and B with both losses; in both, each step measures the angle
between the two losses' gradients. Angles over 90° are steps on which the losses undo each other's work. How many
there are depends on *which* gradient is looked at: all parameters, the backbone's, the exit's, or h's.

    h = exit(BERT(x))                                              the representation, (N, d_e)
    L_ce   cross-entropy of the exit's logits                      (paper §3.1)
    L_scl  supervised contrastive loss of h                        (§4.1; `supervised_contrastive_loss` in common.py)
    A: L = L_ce          B: L = (1−λ)·L_ce + λ·L_scl
    γ = arccos( g_ce·g_scl / (‖g_ce‖ ‖g_scl‖) )                    g = ∇L                    (Figure 2)

    python 01_pilot_gradient_angle.py                              toy task, under 2 minutes on two CPU cores
    python 01_pilot_gradient_angle.py --task rte                   BERT-base, five seeds; wants a GPU

Prints a line per epoch, then two tables: dev scores, and per epoch the mean angle and the share over 90° for each
scope. Draws angle against step into the run's folder.
"""

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import (MHAExit, add_gradients, angle_figure, angles_over, apply_update, autocast, by_method,
                    contrast_flags, epoch_batches, epoch_line, evaluate, gradient_angle, is_finished, load_backbone, loss_gradients,
                    make_batch, make_optimizer, markdown_table, mean_loss, number, own_share, parse, prepare, progress,
                    read_records, resume, run, run_folder, save_checkpoint, score_table, shared_flags, show,
                    supervised_contrastive_loss, to_list, write_record)

SCOPES = ("all", "backbone", "exit", "h")


def train(method, seed, data, args):
    """Fine-tunes one model; method "ce" is model A, "ce+scl" model B. → one dict per epoch, for the record."""
    # N batch size, L tokens, d backbone width, d_e exit width, K classes
    torch.manual_seed(seed)
    _, backbone = load_backbone(args.model)
    exit_ = MHAExit(backbone.config.hidden_size, data.num_labels)
    model = nn.ModuleDict({"backbone": backbone, "exit": exit_}).to(args.device)
    parameters = list(model.parameters())
    num_backbone = len(list(backbone.parameters()))     # the first of `parameters`; the exit's come after them
    lam = 0.0 if method == "ce" else args.lam

    num_updates = args.epochs * len(epoch_batches(data.train, args.batch_size, seed, 0))
    optimizer, schedule = make_optimizer(model, args.lr, num_updates)
    name, state = f"{method}-seed{seed}", [model, optimizer, schedule]
    records = resume(args, name, state)                 # [], unless this run was stopped
    bar = progress(f"{method} seed {seed}", num_updates, len(records) / args.epochs, args)
    for epoch in range(len(records), args.epochs):
        started = time.perf_counter()
        batches = epoch_batches(data.train, args.batch_size, seed, epoch)
        num_micro = sum(map(len, batches))
        # Filled in place and read once an epoch: reading a number makes the host wait for the device.
        losses = torch.zeros(num_micro, device=args.device)
        angles = torch.full((num_micro, len(SCOPES)), torch.nan, device=args.device)
        skipped = torch.zeros((), device=args.device)
        i = 0
        model.train()
        for batch in batches:                           # one update
            for rows in batch:                          # one micro-batch: contrast and angle belong to it alone
                inputs, y = make_batch(data.train, rows, args.device)                       # (N, L) each, (N,)
                with autocast(args):
                    hidden = backbone(**inputs).last_hidden_state                           # (N, L, d)
                    h, logits = exit_(hidden, inputs["attention_mask"])                     # (N, d_e), (N, K)
                ce = F.cross_entropy(logits.float(), y)
                scl = supervised_contrastive_loss(h, y, args.tau)
                loss = (1 - lam) * ce + lam * scl
                weight = len(rows) / sum(map(len, batch))       # of this micro-batch in the update
                if (epoch * num_micro + i) % args.angle_every == 0:
                    # Two backward passes through one graph, each loss alone. h comes last, as one more "parameter".
                    g_ce = loss_gradients(ce, [*parameters, h], retain_graph=True)
                    g_scl = loss_gradients(scl, [*parameters, h])
                    parts = (slice(0, -1), slice(0, num_backbone), slice(num_backbone, -1), slice(-1, None))
                    angles[i] = torch.stack([gradient_angle(g_ce[part], g_scl[part]) for part in parts])
                    # The gradient of `loss` is the same weighted sum of the two: no third pass.
                    add_gradients(parameters, ((1 - lam) * weight, g_ce), (lam * weight, g_scl))
                else:
                    (weight * loss).backward()
                losses[i] = loss.detach()
                i += 1
            skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1], angle=angles[i - 1, 0])

        losses, angles = losses.cpu(), angles.cpu()     # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        record = {"loss": mean_loss(losses, batches, epoch), "scores": evaluate(model, data, args),
                  "skipped": int(skipped), "seconds": seconds,
                  "angles": {scope: to_list(angles[:, k]) for k, scope in enumerate(SCOPES)}}
        records.append(record)
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.epochs, records))
    bar.close()
    return records


def angle_table(records):
    """Per method and epoch, for each scope the mean angle and the share of batches over 90°. → Markdown"""
    rows = []
    for method, runs in by_method(records).items():
        for epoch in range(len(runs[0]["epochs"])):
            row = [method, epoch + 1]
            for scope in SCOPES:
                angles = [angle for run in runs for angle in run["epochs"][epoch]["angles"][scope] if angle is not None]
                row.append(f"{np.mean(angles):.0f}° / {angles_over(angles):.0f} %" if angles else "–")
            rows.append(row)
    return markdown_table(["method", "epoch", "all parameters", "backbone", "exit", "h"], rows)


def main():
    parser = shared_flags(__doc__)
    contrast_flags(parser)
    parser.add_argument("--angle_every", type=number(int, 1), default=1,
                        help="measure the angle every n steps (default 1)")
    args = parse(parser)
    data = prepare(args)
    runs = [(method, seed) for seed in args.seeds for method in ("ce", "ce+scl")]
    for method, seed in own_share(args, runs):
        if not is_finished(args, method, seed):
            write_record(args, method, seed, train(method, seed, data, args))
    records = read_records(args, runs)
    print("\n" + score_table(records))
    print("\nMean angle / share of batches over 90°:\n\n" + angle_table(records) + "\n")
    angle_figure(run_folder(args) / "angles.png", records)


if __name__ == "__main__":
    run(main)
