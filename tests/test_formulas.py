"""Every formula of common.py against a slow float64 loop written from its definition, and a table of edge cases."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics

from common import (LinearExit, MHAExit, distillation_loss, glue_scores, gradient_angle, length_bucketed_batches,
                    loss_gradients, supervised_contrastive_loss)

CASES = [(0, 2, 1, 0.5), (1, 6, 2, 0.5), (2, 9, 3, 0.1), (3, 12, 5, 1.0), (4, 5, 7, 0.05), (5, 7, 2, 2.0)]
each_case = pytest.mark.parametrize("seed, N, K, tau", CASES)


def normal(*shape, seed, scale=1.0, dtype=torch.float64):
    """A random leaf that wants a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * scale).to(dtype).requires_grad_()


def random_labels(N, K, seed):
    return torch.randint(K, (N,), generator=torch.Generator().manual_seed(100 + seed))


def same_value_and_gradients(ours, slow, leaves, tolerance=1e-8):
    """Both losses agree, and so do their gradients with respect to every leaf."""
    torch.testing.assert_close(ours, slow, rtol=tolerance, atol=tolerance)
    for got, wanted in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(slow, leaves)):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# ---- contrastive losses ---------------------------------------------------------------------------------------------

def slow_scl(rows, labels, tau):
    """Mean over anchors with a positive of -1/|P(i)| sum_p log( exp(z_i.z_p/tau) / sum_{a != i} exp(z_i.z_a/tau) )."""
    n, labels = len(rows), [int(label) for label in labels]
    z = [row.double() / (row.double() @ row.double()).sqrt() for row in rows]
    anchor_losses = []
    for i in range(n):
        positives = [p for p in range(n) if p != i and labels[p] == labels[i]]
        if not positives:
            continue
        denominator = sum(torch.exp(z[i] @ z[a] / tau) for a in range(n) if a != i)
        log_likelihood = sum(torch.log(torch.exp(z[i] @ z[p] / tau) / denominator) for p in positives)
        anchor_losses.append(-log_likelihood / len(positives))
    return sum(anchor_losses) / len(anchor_losses) if anchor_losses else sum(row.sum() * 0 for row in rows)


@each_case
def test_scl(seed, N, K, tau):
    h, y = normal(N, 6, seed=seed), random_labels(N, K, seed)
    same_value_and_gradients(supervised_contrastive_loss(h, y, tau), slow_scl(h, y, tau), [h])


@each_case
def test_acl_embed(seed, N, K, tau):
    """N samples and K label embeddings, all of them anchors; gradients to both."""
    h, l, y = normal(N, 6, seed=seed), normal(K, 6, seed=seed + 50), random_labels(N, K, seed)
    ours = supervised_contrastive_loss(torch.cat([h, l]), torch.cat([y, torch.arange(K)]), tau)
    same_value_and_gradients(ours, slow_scl([*h, *l], [*y, *range(K)], tau), [h, l])


@each_case
def test_acl_cl(seed, N, K, tau):
    """2N+2K rows, all of them anchors; the last exit's h^M and l^M are constants."""
    h, l, h_last, l_last = (normal(n, 6, seed=seed + 50 * s) for s, n in enumerate([N, K, N, K]))
    y, classes = random_labels(N, K, seed), torch.arange(K)
    rows = torch.cat([h, l, h_last.detach(), l_last.detach()])
    ours = supervised_contrastive_loss(rows, torch.cat([y, classes, y, classes]), tau)
    slow = slow_scl([*h, *l, *h_last.detach(), *l_last.detach()], [*y, *range(K), *y, *range(K)], tau)
    same_value_and_gradients(ours, slow, [h, l])


def test_scl_averages_over_anchors_with_a_positive_only():
    """Labels 0, 1, 1, 3: the two outer rows are negatives, and no anchors."""
    h = normal(4, 5, seed=7)
    z = (h / h.norm(dim=1, keepdim=True)).detach().numpy()
    e = np.exp(z @ z.T / 0.5)
    first = -math.log(e[1, 2] / (e[1, 0] + e[1, 2] + e[1, 3]))
    second = -math.log(e[2, 1] / (e[2, 0] + e[2, 1] + e[2, 3]))
    by_hand = (first + second) / 2
    loss = supervised_contrastive_loss(h, torch.tensor([0, 1, 1, 3]), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(by_hand, abs=1e-10) and h.grad.isfinite().all()


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [5]], ids=["all different", "one row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scl_without_any_positive_is_exactly_zero_and_has_a_backward(labels, dtype):
    h = normal(len(labels), 5, seed=8, dtype=dtype)
    loss = supervised_contrastive_loss(h, torch.tensor(labels), 0.5)
    loss.backward()
    assert loss.item() == 0 and loss.shape == () and loss.dtype == dtype
    assert torch.equal(h.grad, torch.zeros_like(h))


@pytest.mark.parametrize("labels, scale, tau", [([1] * 6, 1, 0.5), ([0, 1] * 3, 100, 0.5), ([0, 1] * 3, 1, 0.01),
                                                ([1] * 6, 100, 0.01)])
def test_scl_extreme_inputs(labels, scale, tau):
    """One class, long vectors, a small temperature: finite, and the loss of the normalised rows."""
    h = normal(6, 5, seed=9, scale=scale, dtype=torch.float32)
    loss = supervised_contrastive_loss(h, torch.tensor(labels), tau)
    loss.backward()
    normalised = torch.nn.functional.normalize(h.detach().double(), dim=1)
    assert loss.item() == pytest.approx(slow_scl(normalised, labels, tau).item(), rel=1e-4)
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("tau", [0, 0.0, -0.5])
def test_scl_refuses_a_temperature_that_is_not_positive(tau):
    with pytest.raises(ValueError):
        supervised_contrastive_loss(normal(4, 5, seed=9), torch.tensor([0, 0, 1, 1]), tau)


@pytest.mark.parametrize("n", [2, 3, 8, 33])
@pytest.mark.parametrize("tau", [0.01, 0.5])
def test_scl_of_n_identical_vectors_is_log_of_n_minus_1(n, tau):
    for dtype, tolerance in [(torch.float64, 1e-9), (torch.float32, 1e-4)]:    # exp(1/0.01) overflows float32
        h = normal(1, 5, seed=n, dtype=dtype).expand(n, 5)
        loss = supervised_contrastive_loss(h, torch.ones(n, dtype=torch.long), tau)
        assert loss.item() == pytest.approx(math.log(n - 1), abs=tolerance)


@pytest.mark.parametrize("dtype, result", [(torch.half, torch.float32), (torch.bfloat16, torch.float32),
                                           (torch.float32, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_computed_in_float32_or_float64(dtype, result, autocast):
    """Low precision may come in, never out; a matrix product in bf16 would miss the tolerance."""
    h, y = normal(8, 64, seed=10, dtype=dtype), random_labels(8, 3, 10)
    student, teacher = normal(8, 3, seed=11, dtype=dtype), normal(8, 3, seed=12, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        contrast, distillation = supervised_contrastive_loss(h, y, 0.5), distillation_loss(student, teacher, 2.0)
    (contrast + distillation).backward()
    assert contrast.dtype == distillation.dtype == result
    assert contrast.item() == pytest.approx(slow_scl(h, y, 0.5).item(), rel=1e-5)
    assert distillation.item() == pytest.approx(slow_distillation(student, teacher, 2.0).item(), rel=1e-5, abs=1e-6)
    assert h.grad.isfinite().all() and student.grad.isfinite().all()


def test_acl_embed_class_absent_from_the_batch():
    """Classes 2 and 3 have no sample: their label rows stand in every denominator and are no anchors."""
    h, l, y = normal(3, 5, seed=13), normal(4, 5, seed=14), [0, 1, 1]
    rows, labels = torch.cat([h, l]), [*y, 0, 1, 2, 3]
    loss = supervised_contrastive_loss(rows, torch.tensor(labels), 0.5)
    loss.backward()
    z = (rows / rows.norm(dim=1, keepdim=True)).detach().numpy()
    e = np.exp(z @ z.T / 0.5)
    positives = {0: [3], 1: [2, 4], 2: [1, 4], 3: [0], 4: [1, 2]}    # rows 5 and 6 are missing here ...
    by_hand = [np.mean([-math.log(e[i, p] / (e[i].sum() - e[i, i])) for p in ps]) for i, ps in positives.items()]
    assert loss.item() == pytest.approx(np.mean(by_hand), abs=1e-10)
    assert (l.grad[2:].norm(dim=1) > 1e-4).all()                    # ... yet are pushed away as negatives


# ---- distillation ---------------------------------------------------------------------------------------------------

def slow_distillation(student, teacher, T):
    """T^2 times the mean over the batch of sum_k p_k (log p_k - log q_k), p the teacher, q the student."""
    total = 0
    for s, t in zip(student.double(), teacher.detach().double()):
        p, q = torch.exp(t / T) / torch.exp(t / T).sum(), torch.exp(s / T) / torch.exp(s / T).sum()
        total = total + sum(p[k] * (torch.log(p[k]) - torch.log(q[k])) for k in range(len(p)))
    return total / len(student) * T ** 2


@pytest.mark.parametrize("seed, N, K, T", [(0, 1, 2, 1.0), (1, 4, 3, 1.0), (2, 7, 2, 4.0), (3, 5, 6, 0.5)])
def test_distillation(seed, N, K, T):
    student, teacher = normal(N, K, seed=seed, scale=3), normal(N, K, seed=seed + 50, scale=3)
    loss = distillation_loss(student, teacher, T)
    assert loss_gradients(loss, [teacher], retain_graph=True) == [None]
    same_value_and_gradients(loss, slow_distillation(student, teacher, T), [student])


@pytest.mark.parametrize("T", [1.0, 3.0])
def test_distillation_is_zero_for_equal_logits_and_never_negative(T):
    for seed in range(20):
        logits = normal(5, 3, seed=seed, scale=5)
        assert distillation_loss(logits, logits.detach().clone(), T).item() == pytest.approx(0, abs=1e-12)
        for step in (1e-6, 1e-2, 1.0):
            assert distillation_loss(logits, logits + normal(5, 3, seed=seed + 50, scale=step), T).item() >= -1e-13


def test_distillation_extreme_logits():
    """The teacher is sure of what the student rules out: a difference of 160 costs 160."""
    student = torch.tensor([[80.0, -80.0], [80.0, -80.0]], requires_grad=True)
    teacher = torch.tensor([[-80.0, 80.0], [80.0, -80.0]])
    loss = distillation_loss(student, teacher, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(80, rel=1e-6) and student.grad.isfinite().all()


def test_distillation_temperature_squared_factor():
    student, teacher = normal(4, 3, seed=1), normal(4, 3, seed=2)
    plain, scaled = distillation_loss(student, teacher, 1.0), distillation_loss(student * 4, teacher * 4, 4.0)
    assert scaled.item() == pytest.approx(16 * plain.item(), rel=1e-10)


# ---- gradients and their angle --------------------------------------------------------------------------------------

def slow_angle(first, second, shapes):
    flat_first, flat_second = (np.concatenate([np.zeros(s).ravel() if g is None else g.double().numpy().ravel()
                                               for g, s in zip(gradients, shapes)]) for gradients in (first, second))
    cosine = flat_first @ flat_second / np.sqrt(flat_first @ flat_first) / np.sqrt(flat_second @ flat_second)
    return np.degrees(np.arccos(np.clip(cosine, -1, 1)))


SHAPES = [(3, 4), (5,), (1,), (2, 2, 2)]


def random_gradients(seed, scale=1.0, dtype=torch.float32):
    return [normal(*shape, seed=10 * seed + i, scale=scale, dtype=dtype).detach() for i, shape in enumerate(SHAPES)]


def test_loss_gradients():
    """Plain derivatives, None where the loss doesn't reach, and a second pass where the graph is retained."""
    w, b, unused = normal(3, seed=1), normal(1, seed=2), normal(2, seed=3)
    loss = (w ** 2).sum() + 3 * b.sum()
    for retain_graph in (True, False):
        g_w, g_unused, g_b = loss_gradients(loss, [w, unused, b], retain_graph=retain_graph)
        assert torch.equal(g_w, 2 * w.detach()) and g_b.item() == 3 and g_unused is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angle(seed, scale, dtype):
    """One angle over all parameters together, whatever the length of the gradients."""
    first, second = random_gradients(seed, scale, dtype), random_gradients(seed + 20, scale, dtype)
    angle = gradient_angle(first, second)
    assert angle.shape == () and angle.item() == pytest.approx(slow_angle(first, second, SHAPES), abs=1e-3)


def test_angle_none_counts_as_zeros():
    first, second = random_gradients(1), random_gradients(2)
    first[1] = first[3] = second[2] = second[3] = None
    assert gradient_angle(first, second).item() == pytest.approx(slow_angle(first, second, SHAPES), abs=1e-3)


def test_angle_of_equal_and_opposite_gradients():
    for seed in range(10):
        g = random_gradients(seed)
        assert gradient_angle(g, g).item() == pytest.approx(0, abs=0.01)
        assert gradient_angle(g, [-part for part in g]).item() == pytest.approx(180, abs=0.01)
    million = [normal(1_000_000, seed=1, dtype=torch.float32).detach()]
    assert 0 <= gradient_angle(million, million).item() < 0.01


@pytest.mark.parametrize("first, second", [([1., 0.], [0., 1.]), ([1., 1.], [1., -1.]), ([2., 4., 0.], [-8., 4., 3.])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_angle_orthogonal_is_exactly_90(first, second, dtype):
    """Exactly, because the gate closes above 90."""
    assert gradient_angle([torch.tensor(first, dtype=dtype)], [torch.tensor(second, dtype=dtype)]).item() == 90.0
    g = random_gradients(1, dtype=dtype)
    assert gradient_angle([g[0], None], [None, g[1]]).item() == 90.0


def test_angle_of_nothing_is_nan():
    g, zeros, nones = random_gradients(1), [torch.zeros(s) for s in SHAPES], [None] * len(SHAPES)
    for first, second in [(g, nones), (nones, g), (g, zeros), (zeros, g), (zeros, nones), (nones, nones),
                          (zeros, zeros)]:
        angle = gradient_angle(first, second)
        assert angle.shape == () and angle.isnan()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_angle_with_a_non_finite_gradient_is_nan(bad):
    """Also an inf opposite a None, where dot / norms would be 0 / inf, a harmless-looking 90."""
    g, broken = random_gradients(1), random_gradients(2)
    broken[0][1, 2] = bad
    for first, second in [(g, broken), (broken, g), (broken, broken), ([None, *g[1:]], broken)]:
        assert gradient_angle(first, second).isnan()


# ---- exits ----------------------------------------------------------------------------------------------------------

def build_exit(kind, width=10, K=3, seed=0):
    """In eval mode; biases, zero at first, are made random so that they matter."""
    torch.manual_seed(seed)
    exit_ = kind(width, K).eval()
    for parameter in exit_.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return exit_


def slow_mha_exit(w, hidden, mask, heads=4):
    """Every token is a query, one head and one pair of tokens at a time; [CLS] is taken at the end."""
    linear = lambda name, x: w[name + ".weight"] @ x + w[name + ".bias"]
    all_h = []
    for tokens, keep in zip(hidden, mask):
        x = [torch.tanh(linear("down", token)) for token, kept in zip(tokens, keep) if kept]
        q, k, v = ([linear(name, token).chunk(heads) for token in x] for name in ("query", "key", "value"))
        attended = []
        for i in range(len(x)):
            per_head = []
            for a in range(heads):
                weights = [torch.exp(q[i][a] @ k[j][a] / math.sqrt(len(k[j][a]))) for j in range(len(x))]
                per_head.append(sum(weight * v[j][a] for j, weight in enumerate(weights)) / sum(weights))
            attended.append(torch.tanh(linear("output", torch.cat(per_head))))
        all_h.append(attended[0])
    return torch.stack(all_h), torch.stack([linear("classifier", h) for h in all_h])


@pytest.mark.parametrize("mask_dtype", [torch.long, torch.float32, torch.bool])
def test_mha_exit(mask_dtype):
    """h and logits, and the gradients of both with respect to the hidden states and every weight."""
    exit_, hidden = build_exit(MHAExit), normal(4, 7, 10, seed=1, dtype=torch.float32)
    mask = (torch.arange(7) < torch.tensor([7, 4, 1, 6])[:, None]).to(mask_dtype)
    weights = {name: p.detach().double().requires_grad_() for name, p in exit_.named_parameters()}
    hidden_64 = hidden.detach().double().requires_grad_()
    ours, slow = exit_(hidden, mask), slow_mha_exit(weights, hidden_64, mask)
    for got, wanted in zip(ours, slow):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((ours[0] ** 2).sum() + ours[1].sum(), [hidden, *exit_.parameters()])
    wanted_gradients = torch.autograd.grad((slow[0] ** 2).sum() + slow[1].sum(), [hidden_64, *weights.values()])
    for got, wanted in zip(gradients, wanted_gradients):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, d_e", [(MHAExit, 64), (LinearExit, 10)])
def test_exit_representation_and_label_embeddings(kind, d_e):
    """logits = h.l + bias in eval mode; h comes before dropout; l is the classifier's weight, where gradients arrive."""
    exit_, hidden, mask = build_exit(kind), normal(4, 7, 10, seed=1, dtype=torch.float32), torch.ones(4, 7)
    h, logits = exit_(hidden, mask)
    torch.testing.assert_close(logits, h @ exit_.label_embeddings.T + exit_.classifier.bias, rtol=1e-5, atol=1e-5)
    assert torch.equal(exit_.train()(hidden, mask)[0], h) and exit_.label_embeddings.shape == (3, d_e)
    if kind is LinearExit:
        assert torch.equal(h, hidden[:, 0])
    (exit_.label_embeddings ** 2).sum().backward()
    assert torch.equal(exit_.classifier.weight.grad, 2 * exit_.classifier.weight.detach())


@pytest.mark.parametrize("kind", [MHAExit, LinearExit])
@pytest.mark.parametrize("padded_length", [6, 20])
@pytest.mark.parametrize("mask_dtype", [torch.long, torch.float32, torch.bool])
def test_exit_ignores_padding(kind, padded_length, mask_dtype):
    """Junk behind the last token changes nothing."""
    exit_, hidden = build_exit(kind), normal(3, 4, 10, seed=2, dtype=torch.float32)
    junk = normal(3, padded_length - 4, 10, seed=3, scale=50, dtype=torch.float32)
    mask = (torch.arange(padded_length) < 4).expand(3, -1).to(mask_dtype)
    for padded, short in zip(exit_(torch.cat([hidden, junk], dim=1), mask), exit_(hidden, mask[:, :4])):
        torch.testing.assert_close(padded, short, rtol=0, atol=1e-5)


# ---- GLUE scores ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed, n", [(0, 5), (1, 40), (2, 277), (3, 1043)])
@pytest.mark.parametrize("task", ["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte"])
def test_glue_scores(task, seed, n):
    """Against the confusion matrix and against scikit-learn."""
    generator, K = np.random.default_rng(seed), 3 if task == "mnli" else 2
    y = np.append(generator.integers(K, size=n), [0, 1])    # both classes occur
    p = np.append(np.where(generator.random(n) < 0.6, y[:n], generator.integers(K, size=n)), [1, 0])
    tp, tn, fp, fn = (sum(a == i and b == j for a, b in zip(p, y)) for i, j in [(1, 1), (0, 0), (1, 0), (0, 1)])
    accuracy, f1 = 100 * sum(p == y) / len(y), 100 * 2 * tp / (2 * tp + fp + fn)
    matthews = 100 * (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    wanted = {"accuracy": accuracy, "score": accuracy}
    if task == "cola":
        wanted = {"matthews": matthews, "score": matthews}
        assert matthews == pytest.approx(100 * metrics.matthews_corrcoef(y, p))
    elif task in ("mrpc", "qqp"):
        wanted |= {"f1": f1, "score": (accuracy + f1) / 2}
        assert f1 == pytest.approx(100 * metrics.f1_score(y, p))
    assert accuracy == pytest.approx(100 * metrics.accuracy_score(y, p))
    scores = glue_scores(task, p, y)
    for name, value in wanted.items():
        assert scores[name] == pytest.approx(value, abs=1e-9), name


def test_glue_scores_without_any_positive():
    """0/0 counts as 0, silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (list, np.array):
            nothing = kind([0, 0, 0])
            scores = glue_scores("cola", nothing, nothing)
            assert scores["score"] == scores["matthews"] == 0
            assert glue_scores("cola", nothing, kind([0, 1, 0]))["matthews"] == 0
            for task in ("mrpc", "qqp"):
                scores = glue_scores(task, nothing, nothing)
                assert (scores["accuracy"], scores["f1"], scores["score"]) == (100, 0, 50)


@pytest.mark.parametrize("task", ["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte"])
def test_glue_scores_refuse_an_empty_set(task):
    with pytest.raises(ValueError):
        glue_scores(task, [], [])


# ---- batches --------------------------------------------------------------------------------------------------------

def rte_like_lengths(seed):
    return np.clip(np.random.default_rng(seed).lognormal(math.log(62), 0.5, size=2490), 10, 128).astype(int)


@pytest.mark.parametrize("n, batch_size", [(1, 4), (3, 4), (4, 4), (29, 4), (32, 4), (7, 1), (2490, 12), (2491, 12)])
def test_batches_cover_every_index_once(n, batch_size):
    lengths = np.random.default_rng(n).integers(5, 60, size=n)
    batches = length_bucketed_batches(lengths, batch_size, np.random.default_rng(0))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(n))
    sizes = sorted((len(batch) for batch in batches), reverse=True)
    assert sizes == [batch_size] * (n // batch_size) + ([n % batch_size] if n % batch_size else [])


def test_batches_follow_the_generator():
    first, again, other = ([[int(i) for i in batch] for batch in length_bucketed_batches(
        rte_like_lengths(0), 12, np.random.default_rng(seed))] for seed in (3, 3, 4))
    assert first == again and first != other


@pytest.mark.parametrize("seed", range(5))
def test_batches_pad_little_and_come_in_random_order(seed):
    """At most 15 % padding; a batch's length says little about its turn."""
    lengths = rte_like_lengths(seed)
    batches = length_bucketed_batches(lengths, 12, np.random.default_rng(seed))
    longest = [max(lengths[i] for i in batch) for batch in batches]
    padded = sum(length * len(batch) for length, batch in zip(longest, batches))
    assert padded / lengths.sum() <= 1.15
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.5
