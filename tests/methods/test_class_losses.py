"""Methods that learn classes: printed equations by loops, and values of the authors' code."""

import math

import numpy as np
import pytest
import torch

from fisherhash.methods import Batch, Progress, create
from fisherhash.methods._codebooks import far_apart
from fisherhash.methods.base import sign
from fisherhash.methods.classifier import Classifier
from fisherhash.methods.crh import head_bits, reassigned
from fisherhash.methods.csq import CSQ
from fisherhash.methods.dpn import DPN
from fisherhash.methods.greedyhash import GreedyHash, straight_through
from fisherhash.methods.orthohash import OrthoHash

SINGLE = torch.eye(3)[[0, 2, 1, 2]]


SEVERAL = torch.tensor([[1.0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]])


def wave(rows, columns, shift):
    """Numbers between -1.5 and 1.5 that need no random generator."""
    steps = 0.7 * torch.arange(rows * columns, dtype=torch.float32) + shift
    return 1.5 * torch.sin(steps).view(rows, columns)


def batch_of(labels):
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return Batch(labels, torch.arange(len(labels)), torch.empty(len(labels), 1))


def csq_method_with(**options):
    """Eight bits and three classes, with centres that need no random generator."""
    method = CSQ(bits=8, classes=3, **options)
    method.centers.copy_(sign(wave(3, 8, 1.1)))
    method.tie.copy_(sign(wave(1, 8, 0.9)[0]))
    return method


def csq_loop_loss(u, centers, tie, labels, weight):
    """The printed objective, image by image and bit by bit, times the number of bits."""
    total = 0.0
    for i, k in torch.cartesian_prod(torch.arange(len(u)), torch.arange(u.shape[1])).tolist():
        votes = sum(float(centers[c, k]) for c in range(len(centers)) if labels[i][c])
        center = 1.0 if votes > 0 else -1.0 if votes < 0 else float(tie[k])
        h = math.tanh(float(u[i, k]))
        total -= math.log((h + 1) / 2) if center > 0 else math.log(1 - (h + 1) / 2)
        total += weight * (abs(h) - 1) ** 2
    return total / len(u)


@pytest.mark.parametrize("weight", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_csq_loss_is_the_printed_equation(weight, labels):
    u, method = wave(4, 8, 0.3), csq_method_with(quantization=weight)
    expected = csq_loop_loss(u, method.centers, method.tie, labels, weight)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 0.8225228786), (SEVERAL, 0.9197271466)])
def test_csq_the_authors_code_gives_the_same(labels, value):
    """yuanli2333/Hadamard-Matrix-for-hashing at 55cab00, train.py: center_loss, 0.05 times Q_loss,
    and Hash_center_multilables, run on tanh of u = wave(4, 8, 0.3), centres the signs of
    wave(3, 8, 1.1), random vector those of wave(1, 8, 0.9). A mean over bits: ours is 8 times it.
    """
    loss = csq_method_with(quantization=0.05).loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(8 * value, rel=1e-5)


def test_csq_centre_of_several_labels_is_the_majority():
    method = csq_method_with()
    a, b, c = method.centers
    torch.testing.assert_close(method.center_of(torch.tensor([[0.0, 1, 0]]))[0], b)
    torch.testing.assert_close(method.center_of(torch.tensor([[1.0, 1, 1]]))[0], sign(a + b + c))
    both = method.center_of(torch.tensor([[1.0, 1, 0]]))[0]
    torch.testing.assert_close(both, torch.where(a == b, a, method.tie))


def dpn_method_with(**options):
    """Eight bits and three classes, with targets that need no random generator."""
    method = DPN(bits=8, classes=3, **options)
    method.targets.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    return method


def dpn_loop_loss(u, targets, labels, margin):
    """The printed objective, image by image, label by label and bit by bit."""
    total = 0.0
    for i in range(len(u)):
        own = [c for c in range(len(targets)) if labels[i][c]]
        for c in own:
            for k in range(u.shape[1]):
                total += max(0.0, margin - float(targets[c, k]) * float(u[i, k])) / len(own)
    return total / len(u)


@pytest.mark.parametrize("margin", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_dpn_loss_is_the_printed_equation(margin, labels):
    u, method = wave(4, 8, 0.3), dpn_method_with(margin=margin)
    expected = dpn_loop_loss(u, method.targets, labels, margin)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 6.3448600769), (SEVERAL, 6.5249611934)])
def test_dpn_the_authors_code_gives_the_same(labels, value):
    """kamwoh/DPN at b4d721e, scripts/train_hashing.py: calculate_loss (sl, margin 1), run on u =
    wave(4, 8, 0.3) with centroids the signs of wave(3, 8, 1.1). For several labels it ran image by
    image, each value divided by the image's number of labels: theirs is a sum over labels.
    """
    loss = dpn_method_with().loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(value, rel=1e-5)


def test_dpn_labels_that_disagree_on_a_bit_pull_it_to_both_sides():
    method = dpn_method_with(margin=1.0)
    both = batch_of([[1, 1, 0]])
    at_zero = method.loss(torch.zeros(1, 8), both)["loss"]
    assert float(at_zero) == pytest.approx(8.0)
    u = torch.zeros(1, 8, requires_grad=True)
    method.loss(u, both)["loss"].backward()
    mean = (method.targets[0] + method.targets[1]) / 2
    torch.testing.assert_close(u.grad[0], -mean)


def greedyhash_method_with(weight, **options):
    method = GreedyHash(bits=weight.shape[1], classes=weight.shape[0], **options)
    with torch.no_grad():
        method.classifier.weight.copy_(weight)
    return method


def greedyhash_loop_loss(h, weight, labels, alpha):
    """The printed objective, image by image and bit by bit."""
    total = 0.0
    for i in range(len(h)):
        code = [1.0 if float(x) > 0 else -1.0 for x in h[i]]
        scores = [sum(float(w) * b for w, b in zip(row, code, strict=True)) for row in weight]
        normaliser = math.log(sum(math.exp(s) for s in scores))
        own = [c for c in range(len(weight)) if labels[i][c]]
        total += sum(normaliser - scores[c] for c in own) / len(own)
        total += alpha * sum(abs(abs(float(x)) - 1) ** 3 for x in h[i]) / len(h[i])
    return total / len(h)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    "labels", [[[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 1]], [[1, 1, 0], [0, 0, 1]] * 2]
)
def test_greedyhash_loss_is_the_printed_equation(alpha, labels):
    h, weight = wave(4, 8, 0.3), wave(3, 8, 2.0)
    terms = greedyhash_method_with(weight, quantization=alpha).loss(h, batch_of(labels))
    assert float(terms["loss"].detach()) == pytest.approx(
        greedyhash_loop_loss(h, weight, labels, alpha), rel=1e-5
    )


def test_greedyhash_the_authors_code_gives_the_same():
    """ssppp/GreedyHash at e5089b2, cifar1.py: hash_layer, criterion and loss2, run on h =
    wave(4, 8, 0.3), W = wave(3, 8, 2.0), classes 0, 2, 1, 2. Its means are ours.
    """
    h = wave(4, 8, 0.3).requires_grad_()
    method = greedyhash_method_with(wave(3, 8, 2.0), quantization=0.1)
    loss = method.loss(h, batch_of(torch.eye(3)[[0, 2, 1, 2]]))["loss"]
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3.1527583599, rel=1e-5)
    expected = [-0.1163871, 0.2038229, 0.4265082, 0.4458378]
    assert h.grad[0, :4].tolist() == pytest.approx(expected, rel=1e-4)


def test_greedyhash_the_gradient_of_the_code_reaches_the_logits_unclipped():
    h = torch.tensor([[-30.0, -0.2, 0.0, 0.2, 30.0]], requires_grad=True)
    code = straight_through(h)
    assert code.tolist() == [[-1.0, -1.0, -1.0, 1.0, 1.0]]
    slope = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0]])
    (code * slope).sum().backward()
    torch.testing.assert_close(h.grad, slope)


def orthohash_method_with(**options):
    """Eight bits and three classes, with codes that need no random generator."""
    method = OrthoHash(bits=8, classes=3, **options)
    method.codes.copy_(torch.where(wave(3, 8, 1.1) > 0, 1.0, -1.0))
    return method


def orthohash_loop_loss(u, codes, labels, scale, margin):
    """The printed objective, image by image and class by class."""
    total = 0.0
    for i in range(len(u)):
        norm = math.sqrt(sum(float(x) ** 2 for x in u[i])) * math.sqrt(len(u[i]))
        cosines = [
            sum(float(x) * float(o) for x, o in zip(u[i], code, strict=True)) / norm
            for code in codes
        ]
        own = [c for c in range(len(codes)) if labels[i][c]]
        scores = [scale * (cos - margin * (c in own)) for c, cos in enumerate(cosines)]
        normaliser = math.log(sum(math.exp(s) for s in scores))
        total += sum(normaliser - scores[c] for c in own) / len(own)
    return total / len(u)


@pytest.mark.parametrize(("scale", "margin"), [(8.0, 0.2), (3.0, 0.0), (16.0, 0.5)])
@pytest.mark.parametrize("labels", [SINGLE, SEVERAL])
def test_orthohash_loss_is_the_printed_equation(scale, margin, labels):
    u, method = wave(4, 8, 0.3), orthohash_method_with(scale=scale, margin=margin)
    expected = orthohash_loop_loss(u, method.codes, labels, scale, margin)
    assert float(method.loss(u, batch_of(labels))["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "value"), [(SINGLE, 2.8297901154), (SEVERAL, 2.5177249908)])
def test_orthohash_the_authors_code_gives_the_same(labels, value):
    """kamwoh/orthohash at 94c4a03, functions/loss/orthohash.py: OrthoHashLoss() with its defaults,
    multiclass for several labels, run on the cosines of u = wave(4, 8, 0.3) and the signs of
    wave(3, 8, 1.1). Its means are ours.
    """
    loss = orthohash_method_with().loss(wave(4, 8, 0.3), batch_of(labels))["loss"]
    assert float(loss) == pytest.approx(value, rel=1e-5)


def test_orthohash_only_the_direction_of_an_output_counts():
    u, method = wave(4, 8, 0.3).requires_grad_(), orthohash_method_with()
    loss = method.loss(u, batch_of(SINGLE))["loss"]
    torch.testing.assert_close(loss, method.loss(7.0 * u, batch_of(SINGLE))["loss"])
    loss.backward()
    along = (u.grad * u.detach()).sum(1)
    torch.testing.assert_close(along, torch.zeros(4), atol=1e-6, rtol=0)


def classifier_clusters(images=200, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    middles = 2.0 * torch.randn(classes, 8, generator=generator)
    numbers = torch.arange(images) % classes
    return middles[numbers] + torch.randn(images, 8, generator=generator), numbers


def test_classifier_loss_is_the_printed_equation():
    scores = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, 0.0], [0.0, 0.0, 0.0]])
    total = 0.0
    for row, label in zip(scores.tolist(), (0, 2, 1), strict=True):
        total += math.log(sum(math.exp(s) for s in row)) - row[label]
    loss = Classifier(bits=8, classes=3).loss(scores, batch_of(torch.eye(3)[[0, 2, 1]]))["loss"]
    assert float(loss) == pytest.approx(total / 3, rel=1e-6)


def test_classifier_a_code_is_the_code_of_the_likeliest_class():
    torch.manual_seed(0)
    method = Classifier(bits=12, classes=5, codebook_seed=3)
    head = method.head(8).eval()
    features, _ = classifier_clusters()
    logits = head.logits(features)
    assert logits.shape == (200, 12)
    codes = far_apart(5, 12, seed=3)
    for row, scores in zip(logits, head(features), strict=True):
        assert row.tolist() == codes[int(scores.argmax())].tolist()


def test_classifier_it_is_not_defined_for_several_labels():
    assert not Classifier.info.multilabel


def test_crh_loss_is_the_equation():
    torch.manual_seed(0)
    method = create("crh", bits=12, classes=5)
    labels = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 1, 0, 0]])
    u = torch.randn(2, 12)
    scale = max(2.0, math.sqrt(2) * math.log(4))
    expected = 0.0
    for i in range(2):
        share = labels[i] / labels[i].sum()
        scores = []
        for c in range(5):
            code = method.centers[c]
            value = float(u[i] @ code / (u[i].norm() * code.norm()))
            scores.append(scale * (value - 0.2 * float(labels[i, c])))
        total = math.log(sum(math.exp(s) for s in scores))
        expected -= sum(float(share[c]) * (scores[c] - total) for c in range(5)) / 2
    expected += 0.1 * float((u.tanh().abs() - 1).square().mean())
    assert method(u, batch_of(labels))["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("bits", "classes"), [(48, 10), (16, 100), (12, 10), (64, 100)])
def test_crh_no_two_classes_share_a_word(bits, classes):
    method = create("crh", bits=bits, classes=classes)
    size = head_bits(bits, classes)
    for book, part in zip(
        method._books, method.centers.numpy().reshape(classes, -1, size).swapaxes(0, 1), strict=True
    ):
        assert len(np.unique(book, axis=0)) == len(book)
        assert len(np.unique(part, axis=0)) == classes


def test_crh_reassignment_takes_the_word_that_agrees_best():
    rng = np.random.default_rng(0)
    book = np.array([[1, 1, 1], [-1, -1, -1], [1, -1, 1], [-1, 1, -1]], dtype=np.int8)
    sums = np.array([[5, -4, 6], [-3, -3, -3]], dtype=np.float32)
    np.testing.assert_array_equal(reassigned(sums, [book], rng), [[1, -1, 1], [-1, -1, -1]])
    # Both want the same word: only one gets it.
    found = reassigned(np.ones((2, 3), dtype=np.float32), [book], rng)
    assert not np.array_equal(found[0], found[1])


def test_crh_centers_follow_the_codes_of_their_classes():
    torch.manual_seed(0)
    method = create("crh", bits=16, classes=4)
    wanted = method.centers.flip(0).clone()  # each class has another class's codes
    labels = torch.eye(4).repeat(8, 1)
    method.after_step(wanted.repeat(8, 1), batch_of(labels))
    method.on_epoch_start(Progress(1, 10, 0, 10))
    torch.testing.assert_close(method.centers, wanted)
    assert not method.sums.any()
