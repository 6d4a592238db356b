"""Idea 2, ACL-Grad: drop the contrastive term on the batches where it works against cross-entropy.

Even aligned, the contrastive gradient opposes cross-entropy's on some batches. There its weight is set to 0, so that
the step is a plain cross-entropy step; on all others nothing changes. With ACL-Embed this is the paper's full method
for a BERT with one exit, "acl".

    γ = arccos( g_ce·g_acl / (‖g_ce‖ ‖g_acl‖) )                    over all trained parameters   (paper §4.3)
    λ_batch = 0 if γ > 90° else λ
    acl: g = (1−λ_batch)·g_ce + λ_batch·g_acl                      two backward passes, combined by hand

    python 03_acl_grad.py                                          toy task, under 2 minutes on two CPU cores
    python 03_acl_grad.py --task rte                               the main job: BERT-base, five seeds; wants a GPU
    python 03_acl_grad.py --task rte --methods ce scl acl_embed acl        the rows of the paper's Table 1

Prints a line per epoch, then two tables: methods × (dev score, batches in conflict and discarded, minutes), and the
share of batches over the gate's angle per epoch. Draws angle against step, the discarded batches marked.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

from common import (MHAExit, add_gradients, angle_figure, angles_over, apply_update, autocast, by_method,
                    contrast_flags, epoch_batches, epoch_line, evaluate, gradient_angle, is_finished, load_backbone,
                    loss_gradients, make_batch, make_optimizer, markdown_table, mean_loss, mean_std, number, own_share,
                    parse, prepare, progress, read_records, resume, run, run_folder, save_checkpoint, score_table,
                    shared_flags, show, supervised_contrastive_loss, to_list, write_record)

ANGLE_EVERY = 10        # without a gate the angle is only looked at, and a look costs a backward pass  # NEW
METHODS = ("ce", "scl", "acl_embed", "acl")  # NEW


def train(method, seed, data, args):
    """Fine-tunes one model with one of METHODS. → one dict per epoch, for the record."""
    # N batch size, L tokens, d backbone width, d_e exit width, K classes
    torch.manual_seed(seed)
    _, backbone = load_backbone(args.model)
    exit_ = MHAExit(backbone.config.hidden_size, data.num_labels)
    model = nn.ModuleDict({"backbone": backbone, "exit": exit_}).to(args.device)
    parameters = list(model.parameters())
    classes = torch.arange(data.num_labels, device=args.device)     # (K,) the label embeddings' labels
    lam = 0.0 if method == "ce" else args.lam

    num_updates = args.epochs * len(epoch_batches(data.train, args.batch_size, seed, 0))
    optimizer, schedule = make_optimizer(model, args.lr, num_updates)
    name, state = f"{method}-seed{seed}", [model, optimizer, schedule]
    records = resume(args, name, state)                 # [], unless this run was stopped
    angle = torch.nan                                   # the last one measured, for the progress bar
    bar = progress(f"{method} seed {seed}", num_updates, len(records) / args.epochs, args)
    for epoch in range(len(records), args.epochs):
        started = time.perf_counter()
        batches = epoch_batches(data.train, args.batch_size, seed, epoch)
        num_micro = sum(map(len, batches))
        # Filled in place and read once an epoch: reading a number makes the host wait for the device.
        losses = torch.zeros(num_micro, device=args.device)
        angles = torch.full((num_micro,), torch.nan, device=args.device)
        skipped, discarded = torch.zeros(2, device=args.device)  # NEW
        i = 0
        model.train()
        for batch in batches:                           # one update
            for rows in batch:                          # one micro-batch: contrast and angle belong to it alone
                inputs, y = make_batch(data.train, rows, args.device)                       # (N, L) each, (N,)
                with autocast(args):
                    hidden = backbone(**inputs).last_hidden_state                           # (N, L, d)
                    h, logits = exit_(hidden, inputs["attention_mask"])                     # (N, d_e), (N, K)
                ce = F.cross_entropy(logits.float(), y)
                if method in ("acl_embed", "acl"):      # N+K rows: the label embeddings are samples too  # NEW
                    contrast = supervised_contrastive_loss(
                        torch.cat([h, exit_.label_embeddings]), torch.cat([y, classes]), args.tau)
                else:
                    contrast = supervised_contrastive_loss(h, y, args.tau)
                loss = (1 - lam) * ce + lam * contrast
                weight = len(rows) / sum(map(len, batch))       # of this micro-batch in the update
                if method == "acl" or (epoch * num_micro + i) % ANGLE_EVERY == 0:  # NEW
                    # Two backward passes through one graph, each loss alone. Never a third.
                    g_ce = loss_gradients(ce, parameters, retain_graph=True)
                    g_contrast = loss_gradients(contrast, parameters)
                    angles[i] = angle = gradient_angle(g_ce, g_contrast)
                    # The gate is a 0/1 tensor: an `if` would make the host wait for the device. Without an angle
                    # (nan, a gradient of zeros) nothing is over the threshold, so there is no conflict.
                    conflict = (angle > args.angle) & (method == "acl")  # NEW
                    lam_batch = lam * ~conflict  # NEW
                    discarded += conflict  # NEW
                    add_gradients(parameters, ((1 - lam_batch) * weight, g_ce), (lam_batch * weight, g_contrast))  # NEW
                else:
                    (weight * loss).backward()
                losses[i] = loss.detach()
                i += 1
            skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1], angle=angle, discarded=discarded / i)  # NEW

        losses, angles = losses.cpu(), angles.cpu()     # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        record = {"loss": mean_loss(losses, batches, epoch), "scores": evaluate(model, data, args),
                  "skipped": int(skipped), "angles": {"all": to_list(angles)}, "seconds": seconds}
        records.append(record)
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.epochs, records))
    bar.close()
    return records


def discard_table(records, threshold):  # NEW
    """Per method and epoch the share of batches over the threshold, which only "acl" discards. → Markdown"""
    rows = []
    for method, runs in by_method(records).items():
        rows.append([method] + [mean_std([angles_over(epoch["angles"]["all"], threshold) for epoch in epochs])
                                for epochs in zip(*(run["epochs"] for run in runs))])
    return markdown_table([f"batches over {threshold:g}° %", *(f"epoch {e}" for e in range(1, len(rows[0])))], rows)


def main():
    parser = shared_flags(__doc__)
    contrast_flags(parser)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["acl_embed", "acl"],  # NEW
                        help="default: acl_embed acl")
    parser.add_argument("--angle", type=number(float, 0, 180), default=90.0,  # NEW
                        help="discard the contrastive term where γ is over this many degrees (default 90)")
    args = parse(parser)
    data = prepare(args)
    runs = [(method, seed) for seed in args.seeds for method in dict.fromkeys(args.methods)]
    for method, seed in own_share(args, runs):
        if not is_finished(args, method, seed):
            write_record(args, method, seed, train(method, seed, data, args))
    records = read_records(args, runs)
    print("\n" + score_table(records, args.angle))  # NEW
    print("\n" + discard_table(records, args.angle) + "\n")  # NEW
    angle_figure(run_folder(args) / "angles.png", records, args.angle, gated=["acl"])  # NEW


if __name__ == "__main__":
    run(main)
