"""One contract for every method: whoever registers a method is tested here."""

import dataclasses
import importlib
import math
import pkgutil

import pytest
import torch

import fisherhash.methods
from fisherhash import codes
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.evaluation import evaluate, metrics
from fisherhash.methods import (
    FeatureMethod,
    HashMethod,
    create,
    find,
    hyper_parameters,
    registry,
    resolved_options,
)
from fisherhash.model import heads
from fisherhash.model.head import FinishedHead
from fisherhash.training.images import FrozenImages
from fisherhash.training.loop import Loop
from fisherhash.training.settings import Settings

CLASSES, WIDTH = 5, 96
NEED_TWO = {"orthohash"}  # batch statistics of one image do not exist; the refusal is a sentence
GRADIENT = [name for name, method in registry().items() if issubclass(method, HashMethod)]
CLOSED = [name for name, method in registry().items() if issubclass(method, FeatureMethod)]


def clusters(images=600, classes=CLASSES, seed=0, several=False):
    """Gaussian clusters that overlap: features (images, WIDTH), labels (images, classes)."""
    generator = torch.Generator().manual_seed(seed)
    middles = torch.randn(classes, WIDTH, generator=torch.Generator().manual_seed(99))
    labels = torch.eye(classes)[torch.arange(images) % classes]
    if several:
        extra = torch.eye(classes)[torch.randint(classes, (images,), generator=generator)]
        labels = torch.maximum(labels, extra)
    features = labels @ middles + 0.8 * torch.randn(images, WIDTH, generator=generator)
    return features, labels


def started(name, bits=12, images=None, seed=0):
    features, labels = images or clusters()
    torch.manual_seed(seed)
    method = create(name, bits=bits, classes=labels.shape[1])
    head = method.head(features.shape[1])
    head.start(features)
    frozen = FrozenImages(features, labels, head)
    with torch.no_grad():
        method.begin(frozen)
    return method, frozen


def batch_of(method, frozen, index):
    return frozen.batch(torch.as_tensor(list(index)), method.strengths)


def trained(name, bits=12, seed=0, several=False, epochs=13):
    """About 50 steps of batch 128."""
    method, frozen = started(name, bits, clusters(several=several), seed)
    loop = Loop(method, frozen, Settings(epochs=epochs, seed=seed, dropout=0.0))
    return method, frozen, loop.run()


def retrieval(head, several=False):
    """mAP of new images of the same clusters."""
    features, labels = clusters(seed=1, several=several)
    head.eval()
    with torch.no_grad():
        packed = codes.pack(head.logits(features).numpy())
        if not head.hamming:
            finished = head.finished()
            blocks = finished.distances(finished.query(features[:100].numpy()), packed[100:])
            return metrics(blocks, labels[:100].numpy(), labels[100:].numpy()).map
    labels = labels.numpy().astype("uint8")
    return evaluate(packed[:100], packed[100:], labels[:100], labels[100:], bits=head.bits).map


def test_every_module_is_registered():
    """A file in methods/ that registers nothing is a forgotten method."""
    package = fisherhash.methods
    found = set()
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        short = module.name.rsplit(".", 1)[1]
        if short.startswith("_") or short == "base" or module.ispkg:
            continue
        importlib.import_module(module.name)
        found.add(short)
    script = "import fisherhash.methods as m; print(*m.registry())"
    assert found == set(_fresh(script).split())


def _fresh(script):
    """Run in a new interpreter: this one may have imported modules that the package does not."""
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("name", [*GRADIENT, *CLOSED])
def test_info_and_options(name):
    method = find(name)
    assert method.info.name == name
    assert method.info.title
    assert method.info.url.startswith("https://")
    assert 1998 <= method.info.year <= 2026
    assert method.__doc__
    for key, parameter in hyper_parameters(method).items():
        assert parameter.kw_only, key
        assert parameter.default is not dataclasses.MISSING, key
        assert f"{key}:" in method.__doc__, f"{name}: the docstring does not explain {key}"
    options = resolved_options(create(name, bits=12, classes=3))
    assert options == {key: p.default for key, p in hyper_parameters(method).items()}


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize("bits", [12, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_finite_and_has_a_gradient(name, bits, dtype):
    method, frozen = started(name, bits)
    batch = batch_of(method, frozen, range(40))
    outputs = frozen.head(batch.features).detach().to(dtype).requires_grad_()
    before = {k: v.clone() for k, v in method.state_dict().items()}
    torch.manual_seed(1)
    exact = method(outputs.detach().float(), batch)["loss"]
    torch.manual_seed(1)
    terms = method(outputs, batch)
    torch.testing.assert_close(terms["loss"].detach(), exact.detach())  # as if they were float32
    assert all(math.isfinite(float(term.detach())) for term in terms.values())
    assert terms["loss"].ndim == 0
    terms["loss"].backward()
    assert torch.isfinite(outputs.grad).all()
    assert outputs.grad.abs().max() > 0
    for key, value in method.state_dict().items():
        torch.testing.assert_close(value, before[key], msg=f"loss() changed {key}")


@pytest.mark.parametrize("name", GRADIENT)
@pytest.mark.parametrize(
    "index",
    [[7], list(range(0, 50, CLASSES)), [i for i in range(60) if i % CLASSES != 3]],
    ids=["one image", "one class", "an absent class"],
)
def test_odd_batches(name, index):
    method, frozen = started(name)
    batch = batch_of(method, frozen, index)
    if len(index) == 1 and name in NEED_TWO:
        with pytest.raises((FisherhashError, ValueError), match=r"\w+ \w+ \w+ \w+"):
            method(frozen.head.train()(batch.features), batch)
        return
    outputs = frozen.head.train()(batch.features).detach().requires_grad_()
    terms = method(outputs, batch)
    assert math.isfinite(float(terms["loss"].detach()))
    terms["loss"].backward()
    assert torch.isfinite(outputs.grad).all()
    with torch.no_grad():
        method.after_step(outputs.detach(), batch)
    assert all(
        torch.isfinite(v).all() for v in method.state_dict().values() if v.is_floating_point()
    )


@pytest.mark.parametrize("name", GRADIENT)
def test_wrong_shapes_are_refused_with_the_name_of_the_method(name):
    method, frozen = started(name)
    batch = batch_of(method, frozen, range(8))
    outputs = frozen.head(batch.features)
    rows = 8 * method.views
    assert outputs.shape == (rows, method.output_width)
    fewer = dataclasses.replace(batch, labels=batch.labels[:, 1:])
    for wrong, other in ((outputs[:, 1:], batch), (outputs[1:], batch), (outputs, fewer)):
        with pytest.raises(
            UsageError, match=rf"^{name}: (outputs|labels) must have shape \({rows}, "
        ):
            method(wrong, other)
    more = dataclasses.replace(batch, views=method.views + 1)
    with pytest.raises(UsageError, match=f"^{name}: the batch must have {method.views} views"):
        method(outputs, more)


@pytest.mark.parametrize("name", CLOSED)
def test_wrong_features_are_refused_with_the_name_of_the_method(name):
    features, labels = clusters()
    method = create(name, bits=12, classes=CLASSES)
    assert method.fit(features, labels).bits == 12
    with pytest.raises(UsageError, match=f"^{name}: labels must have shape"):
        method.fit(features, labels[1:])
    with pytest.raises(UsageError, match=f"^{name}: features must have shape"):
        method.fit(features[:, 0])
    features[7, 0] = torch.nan
    with pytest.raises(FisherhashError, match=f"^{name}: features hold NaN .* row 7"):
        method.fit(features, labels)


@pytest.mark.parametrize("name", GRADIENT)
def test_learns_clusters_in_fifty_steps(name):
    _, frozen, history = trained(name)
    assert history[-1]["loss"] < history[0]["loss"]
    assert retrieval(frozen.head) > 0.6  # chance is 0.2


@pytest.mark.parametrize("name", CLOSED)
def test_fits_clusters(name):
    features, labels = clusters()
    head = create(name, bits=12, classes=CLASSES).fit(features, labels, seed=0)
    assert retrieval(head) > 0.3


@pytest.mark.parametrize("name", [name for name in GRADIENT if find(name).info.multilabel])
def test_several_labels(name):
    _, frozen, history = trained(name, several=True)
    assert all(math.isfinite(row["loss"]) for row in history)
    # About two in three pairs share a label here.
    untrained = started(name, images=clusters(several=True))[1]
    assert retrieval(frozen.head, several=True) > retrieval(untrained.head, several=True)


@pytest.mark.parametrize("name", GRADIENT)
def test_a_seed_reproduces(name):
    first = trained(name, epochs=2)[1].head.state_dict()
    again = trained(name, epochs=2)[1].head.state_dict()
    other = trained(name, epochs=2, seed=1)[1].head.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", GRADIENT)
def test_a_second_stage_begins_with_the_state_that_the_first_ended_with(name, several):
    """Fine-tuning begins twice, the second time with other features of the same images.

    Centres, codes, classifiers and code books stay; what is remembered of images is made anew.
    """
    if several and not find(name).info.multilabel:
        pytest.skip("one label per image")
    method, frozen, _ = trained(name, several=several, epochs=3)
    learned = {key: value.clone() for key, value in method.state_dict().items()}
    head = {key: value.clone() for key, value in frozen.head.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    moved = frozen.features() + torch.randn(frozen.features().shape, generator=generator)
    again = FrozenImages(moved, frozen.labels, frozen.head)
    torch.manual_seed(7)
    with torch.no_grad():
        method.begin(again)
    now = method.state_dict()
    assert now.keys() == learned.keys()
    assert set(method.remembered) <= learned.keys()
    for key, value in now.items():
        if key in method.remembered:
            assert not torch.equal(value, learned[key]), f"{key} still holds the old features"
        else:
            assert torch.equal(value, learned[key]), f"the second stage lost {key}"
    for key, value in frozen.head.state_dict().items():
        assert torch.equal(value, head[key]), f"the second stage lost the head's {key}"
    if "memory.outputs" in method.remembered:
        torch.testing.assert_close(now["memory.outputs"], again.outputs())


@pytest.mark.parametrize("name", GRADIENT)
def test_state_round_trips(name):
    """A fresh method that loads the state gives the same loss: checkpoints hold all there is."""
    method, frozen, _ = trained(name, epochs=2)
    copy, other = started(name)
    copy.load_state_dict(method.state_dict())
    other.head.load_state_dict(frozen.head.state_dict())
    batch = batch_of(method, frozen, range(32))
    for module in (method, copy):
        module.train()
    with torch.no_grad():
        outputs = frozen.head(batch.features)
        torch.manual_seed(0)
        expected = method.loss(outputs, batch)
        torch.manual_seed(0)
        got = copy.loss(outputs, batch)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


@pytest.mark.parametrize("name", [*GRADIENT, *CLOSED])
def test_the_head_can_be_restored(name):
    method = create(name, bits=12, classes=CLASSES)
    features, labels = clusters()
    if isinstance(method, FeatureMethod):
        head = method.fit(features, labels, seed=0)
    else:
        head = trained(name, epochs=1)[1].head
    head.eval()
    finished = head.finished()
    copy = FinishedHead.restored(finished.config(), finished.tensors())
    assert copy.checksum() == finished.checksum()
    with torch.no_grad():
        expected = head.logits(features)
        again = heads.ArrayHead.of(copy).eval().logits(features)
    logits = torch.from_numpy(copy.logits(features.numpy()))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*GRADIENT, *CLOSED])
@pytest.mark.parametrize("bits", [0, 5000])
def test_impossible_lengths_are_refused(name, bits):
    with pytest.raises(UsageError, match="bits must be between 1 and 1024"):
        create(name, bits=bits, classes=3)
