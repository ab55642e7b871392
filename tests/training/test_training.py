"""From data to a hasher: reproducible, continued after a kill, clear about what it cannot do."""

import csv
import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pytest
import torch
from PIL import Image

from fisherhash import backbones, methods
from fisherhash.data.protocols import resolve
from fisherhash.data.sources import open_data
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.methods import base
from fisherhash.model.folder import is_unfinished
from fisherhash.model.hasher import Hasher
from fisherhash.training.fitting import fit, train
from fisherhash.training.settings import Settings

QUICK = Settings(epochs=4, batch_size=8, learning_rate=0.002, head_epochs=2)


def quick(data, **arguments):
    return fit(data, **({"bits": 12, "backbone": "tiny", "settings": QUICK} | arguments))


def state(trained):
    """Every weight that decides a code, as bytes."""
    hasher = trained.hasher if hasattr(trained, "hasher") else trained
    tensors = {name: array.tobytes() for name, array in hasher.head.tensors().items()}
    return {"network": hasher.network.checksum, **tensors}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("finetune", [False, True])
def test_a_seed_gives_the_same_weights_and_another_seed_others(photos, finetune):
    one, two = (quick(photos, finetune=finetune) for _ in range(2))
    assert state(one) == state(two)
    assert [row["loss"] for row in one.history] == [row["loss"] for row in two.history]
    other = quick(photos, finetune=finetune, settings=dataclasses.replace(QUICK, seed=1))
    assert state(one) != state(other)


def test_fixed_layers_keep_their_weights_and_the_others_do_not(photos, tmp_path):
    from fisherhash import backbones

    fresh = backbones.create("tiny")
    fixed = [f"layers.0.{name}" for name in ("weight", "bias")]
    assert list(fresh.state_dict())[:2] == fixed
    settings = dataclasses.replace(QUICK, fixed_layers=1)
    trained = quick(photos, finetune=True, settings=settings, out=tmp_path / "m")
    for name, value in trained.hasher.network.backbone.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]) == (name in fixed), name
    assert trained.hasher.details["settings"]["fixed_layers"] == 1
    assert state(Hasher.load(tmp_path / "m")) == state(trained)


def faint_classes(root, count=30):
    """Two classes that differ a little in hue, in pictures that differ much in brightness."""
    rng = np.random.default_rng(0)
    for name, hue in (("green", (-8, 8, 0)), ("red", (8, -8, 0))):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.uniform(60, 190) + np.array(hue) + rng.normal(0, 10, (20, 20, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{i}.png")
    return root


def test_train_gives_the_hasher_and_learns_the_classes(tmp_path):
    root = faint_classes(tmp_path / "data")
    settings = Settings(epochs=40, batch_size=16)
    trained = quick(root, settings=settings, bits=16)
    untrained = quick(root, method="lsh", bits=16)
    assert untrained.evaluate().map < 0.75
    assert trained.evaluate().map > 0.9
    hasher = train(root, bits=16, backbone="tiny", settings=settings, recipe=None)
    assert isinstance(hasher, Hasher)
    assert state(hasher) == state(trained)


def test_the_folder_says_how_the_model_was_made_and_holds_no_pickle(photos, tmp_path):
    out = tmp_path / "model"
    trained = quick(photos, out=out, options={"margin": "0.5"})
    assert sorted(files(out)) == [
        "README.md",
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "split.json",
    ]
    details = json.loads((out / "config.json").read_text())["details"]
    assert details["data"] == {
        "name": "photos",
        "images": 42,
        "protocol": "custom",
        "checksum": trained.split.checksum,
        "train": len(trained.split.train),
        "query": len(trained.split.query),
        "database": len(trained.split.database),
        "skipped": 0,
    }
    assert details["options"]["margin"] == 0.5
    given = dataclasses.replace(QUICK, fixed_layers=0).to_json()
    assert details["settings"] == {"finetune": False, **given}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == trained.history
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert {"loss", "pair", "quantization", "learning_rate", "seconds"} <= rows[0].keys()
    loaded = Hasher.load(out)
    assert state(loaded) == state(trained)
    assert loaded.classes == ("a", "b", "c")


KILLED = """
    import sys, time
    import torch
    from fisherhash.training import loop
    from fisherhash.cli import main

    torch.set_num_threads(1)
    write = loop.Loop._checkpoint

    def checkpoint(self, epoch):
        write(self, epoch)
        if self.folder and epoch == 1:
            print("ready", flush=True)
            time.sleep(120)

    loop.Loop._checkpoint = checkpoint
    main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("how", "optimizer"),
    [("--frozen", "sgd"), ("--finetune", "sgd"), ("--finetune --classifier-weight 1", "adamw")],
)
def test_killed_and_continued_is_the_same_as_never_killed(photos, tmp_path, how, optimizer):
    """SIGKILL in a process of its own, after the second epoch; then the same command again."""
    from fisherhash.cli import main

    def command(out):
        settings = "--bits 12 --backbone tiny --epochs 4 --batch-size 8 --learning-rate 0.002"
        words = ["train", str(photos), "--out", str(out), *how.split(), "--optimizer", optimizer]
        return [*words, *settings.split(), "--validation", "0.2", "--recipe", "paper"]

    process = subprocess.Popen(
        [sys.executable, "-c", dedent(KILLED), *command(tmp_path / "killed")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert is_unfinished(tmp_path / "killed")
    assert not (tmp_path / "killed" / "config.json").exists()
    for out in ("killed", "whole"):
        with pytest.raises(SystemExit) as ended:
            main(command(tmp_path / out))
        assert ended.value.code == 0
    killed, whole = files(tmp_path / "killed"), files(tmp_path / "whole")
    assert killed.keys() == whole.keys()
    assert killed["model.safetensors"] == whole["model.safetensors"]
    assert killed["split.json"] == whole["split.json"]

    def rows(data):
        return [{**json.loads(line), "seconds": 0} for line in data.splitlines()]

    assert rows(killed["metrics.jsonl"]) == rows(whole["metrics.jsonl"])
    assert len(rows(whole["metrics.jsonl"])) == 4


def interrupted(photos, out, monkeypatch, **arguments):
    """An unfinished run, stopped after its second epoch."""
    from fisherhash.training import loop

    write = loop.Loop._checkpoint

    def checkpoint(self, epoch):
        write(self, epoch)
        if epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_checkpoint", checkpoint)
        with pytest.raises(KeyboardInterrupt):
            quick(photos, out=out, **arguments)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 16}, "bits: 12 there, 16 now"),
        ({"options": {"margin": 2.0}}, "margin: "),
        ({"settings": dataclasses.replace(QUICK, seed=5)}, "seed: "),
        ({"finetune": True}, "finetune: False there, True now"),
        ({"image_size": 40}, "image_size: 32 there, 40 now"),
    ],
)
def test_other_settings_in_the_folder_of_an_unfinished_run(
    photos, tmp_path, monkeypatch, change, named
):
    interrupted(photos, tmp_path / "m", monkeypatch)
    before = files(tmp_path / "m")
    with pytest.raises(UsageError, match=r"unfinished run with other settings") as caught:
        quick(photos, out=tmp_path / "m", **change)
    assert named in str(caught.value)
    assert files(tmp_path / "m") == before
    quick(photos, out=tmp_path / "m", overwrite=True, **change)
    assert not is_unfinished(tmp_path / "m")


def test_changed_pictures_do_not_continue_a_run(write_photos, tmp_path, monkeypatch):
    root = write_photos(tmp_path / "data", {"a": 8, "b": 8})
    interrupted(root, tmp_path / "m", monkeypatch)
    Image.new("RGB", (30, 30)).save(root / "a" / "03.png")
    with pytest.raises(UsageError, match=r"other settings \(images: "):
        quick(root, out=tmp_path / "m")


def test_a_finished_model_is_kept_until_the_new_one_is_complete(photos, tmp_path, monkeypatch):
    out = tmp_path / "m"
    quick(photos, out=out)
    old = {name: data for name, data in files(out).items() if name != "metrics.jsonl"}
    with pytest.raises(UsageError, match=r"already holds a model.*--overwrite"):
        quick(photos, out=out)
    interrupted(photos, out, monkeypatch, bits=16, overwrite=True)
    assert is_unfinished(out)
    assert {name: data for name, data in files(out).items() if name in old} == old
    assert Hasher.load(out).bits == 12
    # Continued without --overwrite: it was said once.
    quick(photos, out=out, bits=16)
    assert Hasher.load(out).bits == 16
    assert files(out).keys() == {*old, "metrics.jsonl"}


def run_limited(limit, arguments):
    """The command in a process that may write files of at most ``limit`` bytes."""

    def restrict():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    script = "import sys, torch; torch.set_num_threads(1); from fisherhash.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-B", "-c", script, *arguments],
        preexec_fn=restrict,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("when", ["checkpoint", "save"])
def test_a_full_disk_loses_neither_the_old_model_nor_the_training(photos, tmp_path, when):
    """A real limit on file sizes, between the size of a checkpoint and that of a model, or below.

    The features are on the disk already, as they would be after the first run.
    """
    out = tmp_path / "m"
    quick(photos, out=out, bits=8)
    old = {name: data for name, data in files(out).items() if name != "metrics.jsonl"}
    assert len(old["model.safetensors"]) > 24_000
    settings = "--bits 8 --backbone tiny --epochs 3 --batch-size 8 --seed 1 --frozen --recipe paper"
    arguments = ["train", str(photos), "--out", str(out), *settings.split()]
    done = run_limited(16_000 if when == "save" else 2_500, [*arguments, "--overwrite"])
    assert done.returncode == 1, done.stderr
    assert f"could not write {out}: File too large. Nothing there was changed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    found = files(out)
    assert {name: found[name] for name in old} == old
    assert not any(name.endswith(".new") for name in found)
    assert is_unfinished(out) == (when == "save")
    if when == "save":
        # With room again the same command, without training a single epoch anew, gives the model.
        assert json.loads(found["checkpoint.json"])["epoch"] == 3
        settings = Settings(epochs=3, batch_size=8, seed=1)
        continued = quick(photos, out=out, bits=8, settings=settings)
        assert state(Hasher.load(out)) == state(quick(photos, bits=8, settings=settings))
        assert len(continued.history) == 3
        assert not is_unfinished(out)


@pytest.mark.parametrize("finetune", [False, True])
def test_the_validation_slice_is_followed_and_never_trained_on(photos, monkeypatch, finetune):
    from fisherhash.training import loop

    seen = {}

    class Watched(loop.Loop):
        def __init__(self, method, images, settings, **arguments):
            super().__init__(method, images, settings, **arguments)
            seen["labels"] = images.labels
            seen["indices"] = set()
            step = self._run_step

            def run_step(index):
                seen["indices"] |= set(index.tolist())
                return step(index)

            self._run_step = run_step

    monkeypatch.setattr("fisherhash.training.steps.Loop", Watched)
    settings = dataclasses.replace(QUICK, validation=0.25, epochs=8)
    trained = quick(photos, settings=settings, finetune=finetune)
    total = len(trained.split.train)
    held = round(total * 0.25)
    assert len(seen["labels"]) == total - held
    assert seen["indices"] == set(range(total - held))
    assert all(0 < row["validation_map"] <= 1 for row in trained.history)
    assert "validation_map" not in quick(photos, finetune=finetune).history[0]


def test_a_validation_share_that_leaves_nothing(write_photos, tmp_path):
    root = write_photos(tmp_path / "data", {"a": 3, "b": 3})
    with pytest.raises(UsageError, match=r"a validation share of 0\.9 leaves 0 of 4 images"):
        quick(root, settings=dataclasses.replace(QUICK, validation=0.9))


@pytest.mark.parametrize("method", ["dfh", "itq"])
def test_bad_files_are_counted_and_listed_wherever_they_are(write_photos, tmp_path, method):
    """In the training set, and among the queries, which are met only while measuring."""
    root = write_photos(tmp_path / "data", {"a": 10, "b": 10})
    split = quick(root, method=method, bits=8).split
    names = open_data(root).names
    in_train, in_query = names[split.train[3]], names[split.query[0]]
    for name in (in_train, in_query):
        (root / name).write_bytes(b"no picture")
    trained = quick(root, method=method, bits=8, out=tmp_path / "m")
    assert [item.name for item in trained.skipped] == [in_train]
    assert trained.hasher.details["data"]["skipped"] == 1
    measured = trained.evaluate()
    assert measured.queries == len(split.query) - 1
    trained.evaluate()
    trained.save(tmp_path / "m")
    with (tmp_path / "m" / "skipped.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["name", "reason"]
    assert [row[0] for row in rows[1:]] == [in_train, in_query]
    assert all("not an image" in row[1] for row in rows[1:])
    write_photos(root, {"a": 10, "b": 10})
    quick(root, method=method, bits=8, out=tmp_path / "m", overwrite=True)
    assert not (tmp_path / "m" / "skipped.csv").exists()


def test_a_bad_file_does_not_shift_the_labels_of_the_others(write_photos, tmp_path, monkeypatch):
    root = write_photos(tmp_path / "data", {"a": 6, "b": 6})
    (root / "a" / "00.png").write_bytes(b"")
    seen = {}
    start = methods.find("dfh").start

    def spied(self, images):
        seen["labels"], seen["features"] = images.labels.clone(), images.features().clone()
        start(self, images)

    monkeypatch.setattr(methods.find("dfh"), "start", spied)
    trained = quick(root)
    runtime = trained.hasher.network
    names = [name for name in trained.collection.names if name != "a/00.png"]
    kept = [n for n in names if trained.collection.names.index(n) in trained.split.train]
    for name, label, row in zip(kept, seen["labels"], seen["features"], strict=True):
        assert label.tolist() == ([1.0, 0.0] if name.startswith("a/") else [0.0, 1.0])
        picture = trained.hasher.preprocessing.pixels(Image.open(root / name))
        expected = runtime.features(picture.transpose(2, 0, 1)[None])[0]
        np.testing.assert_array_equal(row.numpy(), expected)


def test_no_readable_image_is_a_sentence(write_photos, tmp_path):
    root = write_photos(tmp_path / "data", {"a": 3, "b": 3})
    for path in root.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(FisherhashError, match="only 0 of 4 training images can be read"):
        quick(root)


@pytest.fixture
def toy_method(monkeypatch):
    """A classifier on the logits, registered for one test."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    @base.register
    class Toy(base.HashMethod):
        info = base.MethodInfo(
            name="toy", title="A toy", venue="Nowhere", year=2024, url="https://example.org",
            supervision="classes", multilabel=False,
        )  # fmt: skip

        sharpness: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            self.classifier = torch.nn.Linear(self.bits, self.classes)

        def loss(self, outputs, batch):
            scores = self.classifier(torch.tanh(self.sharpness * outputs))
            return {"loss": torch.nn.functional.cross_entropy(scores, batch.labels.argmax(1))}

    return Toy


def test_a_method_of_ones_own_is_trained_with_its_weights(photos, tmp_path, toy_method):
    settings = Settings(epochs=15, batch_size=8)
    torch.manual_seed(0)
    trained = quick(photos, method="toy", settings=settings, options={"sharpness": "2"})
    again = quick(photos, method="toy", settings=settings, options={"sharpness": "2"})
    fresh = toy_method(bits=12, classes=3).classifier.weight
    assert trained.method.sharpness == 2.0
    assert not torch.equal(trained.method.classifier.weight, fresh)
    assert trained.history[-1]["loss"] < 0.5 * trained.history[0]["loss"]
    # Its weights, too, are drawn from the seed.
    assert torch.equal(trained.method.classifier.weight, again.method.classifier.weight)
    assert state(trained) == state(again)
    # Only the head is saved: what is needed to train is not needed to encode.
    trained.save(tmp_path)
    assert (
        "Method: A toy, Nowhere 2024, https://example.org" in (tmp_path / "README.md").read_text()
    )
    assert state(Hasher.load(tmp_path)) == state(trained)


def test_a_method_for_one_label_refuses_several(tmp_path, photos, toy_method):
    with pytest.raises(UsageError, match="toy is not defined for images with several labels"):
        quick(several_labels(photos, tmp_path), method="toy")


def several_labels(photos, folder):
    """A CSV in which a third of the images have two labels."""
    rows = ["path,label"]
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        also = {"a": ";b", "b": ";c", "c": ";a"}[path.parent.name] if i % 3 == 0 else ""
        rows.append(f"{path},{path.parent.name}{also}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder / "labels.csv"


def test_photos_without_labels(photos, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        shutil.copy(path, plain / f"{i:02d}.png")
    with pytest.raises(UsageError, match=r"'plain' has no labels and dfh learns.*--method itq"):
        quick(plain)
    for method in ("itq", "lsh"):
        trained = quick(plain, method=method, out=tmp_path / method)
        assert sorted(files(tmp_path / method)) == ["README.md", "config.json", "model.safetensors"]
        hasher = Hasher.load(tmp_path / method)
        assert hasher.classes == ()
        assert hasher.encode(plain / "03.png").shape == (1, 2)
        assert hasher.details["settings"] == {"seed": 0}
        with pytest.raises(UsageError, match="has no labels, so there is nothing to measure"):
            trained.evaluate()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"method": "dfhh"}, "Did you mean 'dfh'"),
        ({"backbone": "tinny"}, "Did you mean 'tiny'"),
        ({"bits": 0}, "between 1 and 1024, got 0"),
        ({"bits": 5000}, "between 1 and 1024, got 5000"),
        ({"options": {"margn": 1}}, "Did you mean 'margin'"),
        ({"protocol": "custum"}, "Did you mean 'custom'"),
        ({"device": "gpu"}, "the device 'gpu' cannot be used"),
        ({"image_size": 3}, "between 8 and 4096 pixels"),
        ({"method": "itq", "bits": 40}, "itq: 40 bits need"),
        (
            {"finetune": True, "settings": dataclasses.replace(QUICK, fixed_layers=99)},
            "tiny has 3 layers with weights; from 0 to 2 of them can stay fixed, not 99",
        ),
    ],
)
def test_bad_requests_write_nothing(photos, tmp_path, wrong, sentence):
    with pytest.raises(UsageError, match=sentence):
        quick(photos, out=tmp_path / "m", **wrong)
    assert not (tmp_path / "m").exists()


def test_an_interrupted_measurement_is_continued(photos, tmp_path, monkeypatch):
    """The training is over, the measuring is not: the same call measures, and trains nothing."""
    arguments = {"backbone": "tiny", "bits": 8, "device": "cpu", "measured": True}
    arguments |= {"out": tmp_path / "m", "settings": Settings(epochs=3)}
    with monkeypatch.context() as patch:
        patch.setattr("fisherhash.training.trained.encode_split", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(photos, **arguments)
    assert is_unfinished(tmp_path / "m")
    assert not (tmp_path / "m" / "config.json").exists()
    again = fit(photos, **arguments)
    assert len(again.history) == 3
    assert again.evaluation is not None
    assert not is_unfinished(tmp_path / "m")
    assert f"| mAP | {again.evaluation.map:.4g} |" in (tmp_path / "m" / "README.md").read_text()


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_what_only_the_measuring_met_is_counted_in_the_card(photos, tmp_path):
    """An unreadable query is not among the training images, and is skipped all the same."""
    photos = shutil.copytree(photos, tmp_path / "photos")
    split = resolve(open_data(photos))
    bad = photos / split.names[int(split.query[0])]
    bad.write_bytes(b"no picture")
    trained = fit(photos, backbone="tiny", bits=8, device="cpu", out=tmp_path / "m", measured=True)
    assert [item.name for item in trained.skipped] == [split.names[int(split.query[0])]]
    assert "| skipped | 1 |" in (tmp_path / "m" / "README.md").read_text()


def test_a_network_that_is_fine_tuned_keeps_the_layers_that_suit_it(photos):
    settings = dataclasses.replace(QUICK, epochs=1, head_epochs=1, batch_size=4)
    network = backbones.create("squeezenet1.0", pretrained=False, image_size=32)
    first = network.layers_in_order()
    trained = fit(photos, method="csq", bits=8, backbone=network, finetune=True, settings=settings)
    after = trained.hasher.network.backbone.layers_in_order()
    same = [
        all(torch.equal(a, b) for a, b in zip(x.parameters(), y.parameters(), strict=True))
        for x, y in zip(first, after, strict=True)
    ]
    assert same == [True] * network.early + [False] * (len(first) - network.early)
