"""Idea 1, ACL-Embed: the label embeddings join the contrastive batch.

The classifier's last layer holds one weight row per class, its label embedding. Put into the contrastive batch as one
more sample of its class, it aligns the two losses: cross-entropy pulls h_i towards l_{y_i}, and now the contrastive
loss does too. Each sample gets at least one positive, and a class that is absent from the batch still repels.

    l_k    row k of the exit's last linear layer                   the label embedding, (K, d_e)
    L_acl  = L_scl on the N+K rows {(h_i, y_i)} ∪ {(l_k, k)}       (paper §4.2; gradients flow into l_k too)
    ce:        L = L_ce
    scl:       L = (1−λ)·L_ce + λ·L_scl                            model B of script 01
    acl_embed: L = (1−λ)·L_ce + λ·L_acl

    python 02_acl_embed.py                                         toy task, under 2 minutes on two CPU cores
    python 02_acl_embed.py --task rte                              BERT-base, five seeds; wants a GPU

Prints a line per epoch, then one table, methods × (dev score, share of batches in conflict, minutes). The angle costs
a second backward pass, so it is measured on every tenth batch only.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn

from common import (MHAExit, add_gradients, apply_update, autocast, contrast_flags, epoch_batches, epoch_line,
                    evaluate, gradient_angle, is_finished, load_backbone, loss_gradients, make_batch, make_optimizer,
                    mean_loss, number, own_share, parse, prepare, progress, read_records, resume, run, save_checkpoint,
                    score_table, shared_flags, show, supervised_contrastive_loss, to_list, write_record)

METHODS = ("ce", "scl", "acl_embed")  # NEW


def train(method, seed, data, args):
    """Fine-tunes one model with one of METHODS. → one dict per epoch, for the record."""
    # N batch size, L tokens, d backbone width, d_e exit width, K classes
    torch.manual_seed(seed)
    _, backbone = load_backbone(args.model)
    exit_ = MHAExit(backbone.config.hidden_size, data.num_labels)
    model = nn.ModuleDict({"backbone": backbone, "exit": exit_}).to(args.device)
    parameters = list(model.parameters())
    classes = torch.arange(data.num_labels, device=args.device)     # (K,) the label embeddings' labels  # NEW
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
                if method == "acl_embed":               # N+K rows: the label embeddings are samples too  # NEW
                    contrast = supervised_contrastive_loss(  # NEW
                        torch.cat([h, exit_.label_embeddings]), torch.cat([y, classes]), args.tau)  # NEW
                else:  # NEW
                    contrast = supervised_contrastive_loss(h, y, args.tau)
                loss = (1 - lam) * ce + lam * contrast
                weight = len(rows) / sum(map(len, batch))       # of this micro-batch in the update
                if (epoch * num_micro + i) % args.angle_every == 0:
                    # Two backward passes through one graph, each loss alone: that shows the angle ...
                    g_ce = loss_gradients(ce, parameters, retain_graph=True)
                    g_contrast = loss_gradients(contrast, parameters)
                    angles[i] = angle = gradient_angle(g_ce, g_contrast)
                    add_gradients(parameters, ((1 - lam) * weight, g_ce), (lam * weight, g_contrast))
                else:
                    (weight * loss).backward()          # ... and this gives the same gradient in one pass
                losses[i] = loss.detach()
                i += 1
            skipped += apply_update(optimizer, schedule)
            show(bar, loss=losses[i - 1], angle=angle)

        losses, angles = losses.cpu(), angles.cpu()     # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        record = {"loss": mean_loss(losses, batches, epoch), "scores": evaluate(model, data, args),
                  "skipped": int(skipped), "angles": {"all": to_list(angles)}, "seconds": seconds}
        records.append(record)
        save_checkpoint(args, name, state, records)
        bar.write(epoch_line(method, seed, args.epochs, records))
    bar.close()
    return records


def main():
    parser = shared_flags(__doc__)
    contrast_flags(parser)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")  # NEW
    parser.add_argument("--angle_every", type=number(int, 1), default=10,
                        help="measure the angle every n steps (default 10)")
    args = parse(parser)
    data = prepare(args)
    runs = [(method, seed) for seed in args.seeds for method in dict.fromkeys(args.methods)]  # NEW
    for method, seed in own_share(args, runs):
        if not is_finished(args, method, seed):
            write_record(args, method, seed, train(method, seed, data, args))
    records = read_records(args, runs)
    print("\n" + score_table(records))


if __name__ == "__main__":
    run(main)
