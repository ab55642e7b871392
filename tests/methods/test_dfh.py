"""Deep Fisher Hashing: its steps against brute force, its limits, its parts."""

import itertools
import math

import pytest
import torch

from fisherhash.errors import UsageError
from fisherhash.methods import Batch, Progress, create
from fisherhash.methods.dfh import DFH


class Fixed:
    """A training set whose outputs are given."""

    def __init__(self, outputs, labels):
        self._outputs, self.labels = outputs, labels

    def outputs(self):
        return self._outputs

    streamed = False

    def features(self):
        return self._outputs


def started(outputs, labels, **options):
    method = DFH(bits=outputs.shape[1], classes=labels.shape[1], **options)
    method.begin(Fixed(outputs, labels))
    return method


def toy(images=24, bits=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(images, bits, generator=generator)
    labels = torch.eye(classes)[torch.arange(images) % classes]
    return outputs, labels


def batch_of(labels, index):
    index = torch.as_tensor(index)
    return Batch(labels[index], index, torch.empty(len(index), 1))


def loop_pair_loss(outputs, labels, index, margin, weight=1.0):
    """The printed pair loss, pair by pair, with math.log and math.exp."""
    total = weights = 0.0
    for i, j in itertools.product(index, range(len(outputs))):
        if i == j:
            continue
        dissimilarity = -0.5 * float(outputs[i] @ outputs[j])
        similar = bool((labels[i] * labels[j]).sum() > 0)
        exponent = dissimilarity + margin if similar else -dissimilarity + margin
        w = weight if similar else 1.0
        total += w * math.log(1 + math.exp(exponent))
        weights += w
    return total / weights


@pytest.mark.parametrize("margin", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_loss_is_the_printed_objective(margin, weight):
    outputs, labels = toy()
    labels[0, 1] = 1  # an image with two labels
    method = started(outputs, labels, margin=margin, positive_weight=weight, quantization=0.3)
    index = [0, 5, 7, 11]
    terms = method.loss(outputs[index], batch_of(labels, index))
    proportions = labels / labels.sum(1, keepdim=True)
    quantization = 0.0
    for i in index:
        for k in range(outputs.shape[1]):
            pull = float(method.centers[k] @ proportions[i]) + float(outputs[i, k])
            quantization += ((1.0 if pull > 0 else -1.0) - float(outputs[i, k])) ** 2 / len(index)
    pair = loop_pair_loss(outputs, labels, index, margin, weight)
    assert float(terms["pair"]) == pytest.approx(pair, rel=1e-5)
    assert float(terms["quantization"]) == pytest.approx(quantization, rel=1e-5)
    assert float(terms["loss"]) == pytest.approx(pair + 0.3 * quantization, rel=1e-5)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_separation_is_the_cross_entropy_of_the_cosines_to_all_centres(margin):
    outputs, labels = toy()
    labels[0, 1] = 1  # an image with two labels
    without = started(outputs, labels)
    method = started(outputs, labels, separation=2.5, separation_margin=margin)
    index = [0, 5, 7, 11]
    expected = 0.0
    for i in index:
        own = labels[i] / labels[i].sum()
        cosines = [
            float(outputs[i] @ c) / float(outputs[i].norm() * c.norm()) for c in method.centers.T
        ]
        closer = [cosine - margin * float(y) for cosine, y in zip(cosines, labels[i], strict=True)]
        scores = [math.sqrt(outputs.shape[1]) * cosine for cosine in closer]
        total = sum(math.exp(score) for score in scores)
        log_shares = [math.log(math.exp(score) / total) for score in scores]
        expected -= sum(float(y) * share for y, share in zip(own, log_shares, strict=True))
    expected /= len(index)
    batch = batch_of(labels, index)
    terms, others = method.loss(outputs[index], batch), without.loss(outputs[index], batch)
    assert float(terms["separation"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["loss"] - others["loss"]) == pytest.approx(2.5 * expected, rel=1e-4)
    assert "separation" not in others


@pytest.mark.parametrize("intra", [0.1, 1.0, 5.0])
def test_b_step_is_the_global_minimum(intra):
    outputs, labels = toy(images=10, bits=5)
    labels[3, 2] = 1
    method = started(outputs, labels, intra=intra)
    proportions = labels / labels.sum(1, keepdim=True)
    found = method.binary(outputs, proportions)
    for i in range(len(outputs)):
        center = method.centers @ proportions[i]
        values = {}
        for b in itertools.product([-1.0, 1.0], repeat=5):
            code = torch.tensor(b)
            values[b] = float(
                intra * (code - center).square().sum() + (code - outputs[i]).square().sum()
            )
        assert values[tuple(found[i].tolist())] == pytest.approx(min(values.values()), abs=1e-4)


def test_the_authors_loss_gives_the_same():
    """Frozen from the authors' repository (commit 43c62aa), models/DFH_loss.py, DFHLoss_margin with
    eta 0.5; the shipped loss has no margin. Theirs is a mean over batch x N, an image with itself
    included, and its quantisation a mean over bits; the conversion is below.
    """
    outputs = 1.5 * torch.sin(torch.arange(48.0)).reshape(12, 4)
    labels = torch.eye(3)[torch.arange(12) % 3]
    method = started(outputs, labels, margin=0.0)
    method.centers = torch.where(torch.cos(torch.arange(12.0)).reshape(4, 3) > 0, 1.0, -1.0)
    index = [0, 1, 4, 11]
    terms = method.loss(outputs[index], batch_of(labels, index))
    with_itself = sum(math.log(1 + math.exp(-0.5 * float(outputs[i] @ outputs[i]))) for i in index)
    metric = (float(terms["pair"]) * 4 * 11 + with_itself) / (4 * 12)
    assert metric + 0.5 * float(terms["quantization"]) / 4 == pytest.approx(1.0240079, rel=1e-6)


def test_multi_label_threshold():
    """Bits follow the centres unless u disagrees by more than mu |C y|; at C y = 0 they are u."""
    method = DFH(bits=3, classes=2, intra=1.0)
    method.centers = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    both = torch.tensor([[0.5, 0.5]])
    follow = method.binary(torch.tensor([[-0.9, -0.1, 0.9]]), both)
    assert follow.tolist() == [[1.0, -1.0, -1.0]]
    against = method.binary(torch.tensor([[-1.1, 0.1, 1.1]]), both)
    assert against.tolist() == [[-1.0, 1.0, 1.0]]


def test_centres_may_start_far_apart():
    outputs, labels = toy(bits=12, classes=4)
    method = started(outputs, labels, initial_centers="far-apart")
    distances = (12 - method.centers.T @ method.centers) / 2
    assert distances[~torch.eye(4, dtype=torch.bool)].min() >= 7
    torch.testing.assert_close(method.relaxed, method.centers)


@pytest.mark.parametrize(
    ("parts", "has_pair", "mu"),
    [
        ("pair", True, 0.0),
        ("pair,margin", True, 0.0),
        ("pair,intra", True, 1.0),
        ("intra,inter", False, 1.0),
    ],
)
def test_parts_switch_off(parts, has_pair, mu):
    outputs, labels = toy()
    method = started(outputs, labels, parts=parts, margin=2.0)
    terms = method.loss(outputs[:4], batch_of(labels, range(4)))
    assert ("pair" in terms) == has_pair
    if has_pair:
        margin = 2.0 if "margin" in parts else 0.0
        expected = loop_pair_loss(outputs, labels, range(4), margin)
        assert float(terms["pair"]) == pytest.approx(expected, rel=1e-5)
    if mu == 0.0:
        before = method.centers.clone()
        method.on_epoch_start(Progress(0, 1, 0, 1))
        torch.testing.assert_close(method.centers, before)
        torch.testing.assert_close(
            method.binary(outputs, labels), torch.where(outputs > 0, 1.0, -1.0)
        )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parts": "pairs"}, "Did you mean 'pair'"),
        ({"parts": "margin"}, "at least 'pair' or 'intra'"),
        ({"parts": "intra,margin"}, "belongs to the part 'pair'"),
        ({"parts": "pair,inter"}, "only the part 'intra' uses"),
    ],
)
def test_bad_options_are_named(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        create("dfh", bits=4, classes=2, options=options)


def pairs_of_classes(images=60, width=12, classes=6, seed=0):
    """Features whose classes come in pairs that look alike: 0 and 1, 2 and 3, …"""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randn(classes // 2, width, generator=generator)
    own = torch.randn(classes, width, generator=generator)
    number = torch.arange(images) % classes
    features = 4 * kinds[number // 2] + own[number]
    features += 0.3 * torch.randn(images, width, generator=generator)
    return features, torch.eye(classes)[number]


class Seen(Fixed):
    """A training set whose features are given besides its outputs."""

    def __init__(self, outputs, labels, features):
        super().__init__(outputs, labels)
        self._features = features

    streamed = False

    def features(self):
        return self._features


def graded(features, labels, bits=24, seed=0, **options):
    outputs = torch.randn(len(labels), bits, generator=torch.Generator().manual_seed(seed))
    method = DFH(bits=bits, classes=labels.shape[1], initial_centers="graded", **options)
    method.begin(Seen(outputs, labels, features))
    return method


def test_graded_centres_are_nearer_where_classes_look_alike():
    method = graded(*pairs_of_classes())
    assert set(method.centers.unique().tolist()) <= {-1.0, 1.0}
    torch.testing.assert_close(method.relaxed, method.centers)
    distances = (24 - method.centers.T @ method.centers) / 2
    alike = torch.zeros(6, 6, dtype=torch.bool)
    alike[[0, 2, 4], [1, 3, 5]] = True
    others = torch.ones(6, 6).triu(1).bool() & ~alike
    assert distances[alike].max() < distances[others].min()


@pytest.mark.parametrize("step", ["exact", "gradient"])
def test_the_second_stage_keeps_the_graded_code_book(step):
    """The network has moved on and so have its features; the classes keep their codes."""
    features, labels = pairs_of_classes()
    method = graded(features, labels, center_step=step)
    method.on_epoch_start(Progress(0, 1, 0, 1))
    outputs = torch.randn(60, 24, generator=torch.Generator().manual_seed(7))
    centers, relaxed = method.centers.clone(), method.relaxed.clone()
    method.begin(Seen(outputs, labels, features.flip(1) ** 2))
    torch.testing.assert_close(method.centers, centers)
    torch.testing.assert_close(method.relaxed, relaxed)
    torch.testing.assert_close(method.memory.outputs, outputs)


def test_the_centre_step_leaves_a_graded_code_book_that_the_outputs_agree_with():
    """No flip improves it for its own products; for the paper's, all equally far, some do."""
    features, labels = pairs_of_classes()
    method = graded(features, labels, inter=50.0)
    book = method.centers.clone()
    method.memory.outputs.copy_(labels @ book.T)
    method.on_epoch_start(Progress(0, 1, 0, 1))
    torch.testing.assert_close(method.centers, book)
    paper = started(labels @ book.T, labels, inter=50.0)
    torch.testing.assert_close(paper.centers, book)
    paper.on_epoch_start(Progress(0, 1, 0, 1))
    assert not torch.equal(paper.centers, book)


@pytest.mark.parametrize("step", ["exact", "gradient", "released"])
@pytest.mark.parametrize("several", [False, True])
def test_graded_centres_with_several_labels_and_a_class_without_images(step, several):
    features, labels = pairs_of_classes()
    features[:, 3] = 7.0  # never varies
    labels = torch.cat([labels, torch.zeros(60, 1)], 1)
    if several:
        labels[::5, 2] = 1.0
    method = graded(features, labels, center_step=step)
    method.on_epoch_start(Progress(0, 1, 0, 1))
    index = list(range(10))
    u = method.memory.outputs[index].clone().requires_grad_()
    loss = method.loss(u, batch_of(labels, index))["loss"]
    loss.backward()
    method.after_step(u.detach(), batch_of(labels, index))
    assert torch.isfinite(loss)
    assert torch.isfinite(u.grad).all()
    assert method.centers.shape == (24, 7)
    assert set(method.centers.unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize("several", [False, True])
def test_a_positive_weight_of_zero_balances_the_pairs(several):
    outputs, labels = toy(images=40, classes=5)
    if several:
        labels[::3, 4] = 1.0
    similar = (labels @ labels.T > 0).float().fill_diagonal_(0.0)
    s = float(similar.sum()) / (40 * 39)
    balanced = started(outputs, labels, positive_weight=0.0)
    explicit = started(outputs, labels, positive_weight=(1 - s) / s)
    index = [0, 5, 7, 11]
    got = balanced.loss(outputs[index], batch_of(labels, index))
    expected = explicit.loss(outputs[index], batch_of(labels, index))
    for name in ("pair", "loss"):
        assert float(got[name]) == pytest.approx(float(expected[name]), rel=1e-5)
    plain = started(outputs, labels).loss(outputs[index], batch_of(labels, index))
    assert float(got["pair"]) != pytest.approx(float(plain["pair"]), rel=1e-3)
    assert balanced.positive_weight == 0.0  # what was asked for is what is saved


@pytest.mark.parametrize("several", [False, True])
def test_the_pair_part_alone_is_dpsh(several):
    outputs, labels = toy()
    if several:
        labels[::4, 0] = 1.0
    pair = started(outputs, labels, parts="pair", quantization=0.03)
    dpsh = create("dpsh", bits=6, classes=3, options={"quantization": 0.03, "loss_scale": 1.0})
    dpsh.begin(Fixed(outputs, labels))
    batch = batch_of(labels, [0, 4, 8, 9])
    gradients = []
    for method in (pair, dpsh):
        u = (outputs[batch.index] + 0.1).requires_grad_()
        terms = method(u, batch)
        terms["loss"].backward()
        gradients.append((terms["loss"].detach(), u.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
