"""The command line: data on stdout, talk on stderr, an exit code and a sentence for every fault."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fisherhash import __version__, cli, codes
from fisherhash.model.hasher import Hasher
from fisherhash.system.options import options_of
from fisherhash.training.fitting import fit
from fisherhash.training.settings import NetworkOptions, Settings

VERBS = sorted(name for name in cli.app if not name.startswith("-"))
QUICK = "--backbone tiny --epochs 2 --batch-size 8 --learning-rate 0.002 --bits 12 --frozen"
TINY = QUICK.split()


def command(*words, **options):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from fisherhash.cli import main; main()", *map(str, words)],
        capture_output=True,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def model(photos, tmp_path_factory):
    """A trained model; not to be changed by a test."""
    out = tmp_path_factory.mktemp("cli") / "model"
    settings = Settings(epochs=3, batch_size=8, seed=4)
    fit(photos, bits=12, backbone="tiny", settings=settings, out=out)
    return out


def test_every_verb_explains_itself(run):
    assert {"demo", "train", "encode", "evaluate", "check-data", "methods", "doctor"} <= set(VERBS)
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(verb in out for verb in VERBS)
    for verb in VERBS:
        code, out, err = run(verb, "--help")
        assert (code, err) == (0, "")
        assert f"usage: fisherhash {verb}" in out.replace("Usage", "usage")
        # Every parameter has a description, not only a type.
        for line in re.findall(r"│ [ *]  (?:[A-Z]+ )?(--[a-z-]+.*?)│", out):
            assert len(line.split(None, 1)) == 2, line


def test_help_fills_its_lines_and_names_its_arguments(run):
    _, out, _ = run("encode", "--help")
    assert "Usage: fisherhash encode [OPTIONS] IMAGES..." in out
    # The line breaks of the docstring are not those of the help text.
    lines = [line.strip("│ ") for line in out.splitlines()]
    assert "listed in FILE.skipped.csv beside it." not in lines
    assert "are listed in FILE.skipped.csv beside it." in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_every_setting_is_a_flag_with_its_default(run, verb):
    _, out, _ = run(verb, "--help")
    shown = " ".join(out.replace("│", " ").split())
    for options in (Settings, NetworkOptions):
        for one in options_of(options):
            if (verb, one.name) == ("compare", "seed"):
                assert not re.search(r"--seed\b(?!s)", shown)
                continue
            assert one.help
            assert f"{one.flag} " in shown
            assert "".join(one.help.split()) in "".join(shown.split())
    assert "--finetune --frozen" in shown
    assert "[default: 40]" in shown
    assert "one-cycle, cosine, step, constant" in shown


def test_flags_become_settings(run, photos, tmp_path):
    words = "--optimizer adamw --weight-decay 0.1 --schedule step --dropout 0 --validation 0.2"
    words += " --recipe paper"
    words = [*words.split(), "--validation-every", "2", "--seed", "7", "--image-size", "48"]
    code, out, err = run("train", photos, "--out", tmp_path / "m", *TINY, *words, "--json")
    assert code == 0, err
    result = json.loads(out)
    expected = Settings(
        epochs=2, batch_size=8, learning_rate=0.002, optimizer="adamw", weight_decay=0.1,
        schedule="step", dropout=0.0, validation=0.2, validation_every=2, seed=7, fixed_layers=0,
    )  # fmt: skip
    assert result["settings"] == {"finetune": False, **expected.to_json()}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["preprocessing"]["size"] == 48


def test_no_verb_is_help_and_the_version_is_the_packages(run):
    code, out, _ = run()
    assert code == 0
    assert "Usage: fisherhash COMMAND" in out
    assert run("--version")[1].strip() == __version__
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == __version__


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian", "x"], 'Did you mean "train"'),
        (["check", "x"], 'Did you mean "check-data"'),
        (
            ["export", "onnx", "nowhere", "--out", "x.onnx"],
            "nowhere does not exist. Make a model with",
        ),
        (["export", "onnx", "generl-64", "--out", "x.onnx"], "Did you mean 'general-64'?"),
        (["export", "onnx", "general-64"], "--out is missing"),
        (["train", "PHOTOS", "--outt", "m"], "--outt. Did you mean --out?"),
        (["train", "PHOTOS", "--out", "m", "--bitz", "8"], "--bitz. Did you mean --bits?"),
        (["train", "PHOTOS", "--out", "m", "--epoch", "8"], "Did you mean --epochs?"),
        (["train", "PHOTOS", "--out", "m", "--method", "dfhh"], "Did you mean 'dfh'?"),
        (["train", "PHOTOS", "--out", "m", "--method", "dhf"], "Did you mean 'dfh'?"),
        (["train", "PHOTOS", "--out", "m", "--backbone", "tinny"], "Did you mean 'tiny'?"),
        (["train", "PHOTOS", "--out", "m", "--backbone", "resnet50"], "'torchvision:resnet50'"),
        (
            ["train", "PHOTOS", "--out", "m", "--backbone", "vit_base_patch16_224"],
            "'timm:vit_base_patch16_224'",
        ),
        (["train", "PHOTOS", "--out", "m", "--optimizer", "adam"], 'Did you mean "adamw"'),
        (["train", "PHOTOS", "--out", "m", "--set", "margn=1"], "Did you mean 'margin'?"),
        (["train", "PHOTOS", "--out", "m", "--set", "margin"], "--set takes NAME=VALUE"),
        (["train", "PHOTOS", "--out", "m", "--protocol", "custm"], "Did you mean 'custom'?"),
        (["train", "PHOTOS", "--out", "m", "--bits", "0"], "between 1 and 1024, got 0"),
        (["train", "PHOTOS", "--out", "m", "--bits", "5000"], "between 1 and 1024, got 5000"),
        (
            ["train", "PHOTOS", "--out", "m", "--bits", "abc"],
            "--bits must be a whole number, got 'abc'",
        ),
        (["train", "PHOTOS", "--out", "m", "--epochs", "0"], "epochs must be between 1"),
        (["train", "PHOTOS", "--out", "m", "--learning-rate", "nan"], "learning_rate must be"),
        (["train", "PHOTOS", "--out", "m", "--device", "gpu"], "device 'gpu' cannot be used"),
        (["train", "PHOTOS", "--out", "m", "--resume"], "no unfinished run to resume"),
        (["train", "PHOTOS"], "--out is missing; see fisherhash train --help"),
        (["train", "PHOTOS", "--out"], "--out needs a value; see fisherhash train --help"),
        (["train", "--out", "m"], "DATA is missing; see fisherhash train --help"),
        (
            ["train", "PHOTOS", "again", "--out", "m"],
            "unexpected: again; see fisherhash train --help",
        ),
        (["train", "sampel", "--out", "m"], "Did you mean 'sample'?"),
        (["train", "nowhere", "--out", "m"], "there is no file or folder 'nowhere'"),
        (["encode", "--model", "m"], "no image given"),
        (["encode", "PHOTOS", "--model", "nowhere"], "nowhere does not exist. Make a model with"),
        (["encode", "PHOTOS", "--model", "PHOTOS"], "is not a model folder: it has no config"),
        (["encode", "nowhere.png", "--model", "MODEL"], "there is no file or folder"),
        (["encode", "PHOTOS", "--model", "MODEL", "--jsn"], "Did you mean --json?"),
        (["evaluate", "--model", "MODEL", "--data", "nowhere"], "there is no file or folder"),
        (["evaluate", "--model", "MODEL", "--data", "PHOTOS", "--compat", "hasnet"], "'hashnet'"),
        (["evaluate", "--model", "MODEL", "--data", "PHOTOS", "--protocol", "cifar"], "cifar10"),
        (["check-data", "nowhere"], "there is no file or folder"),
        (["check-data", "PHOTOS", "--protocol", "custm"], "Did you mean 'custom'?"),
        (["methods", "--jsn"], "Did you mean --json?"),
        (["sync", "photos.index", "photos"], "Did you mean: fisherhash index sync?"),
    ],
)
def test_bad_use_is_a_sentence_and_exit_code_2(
    run, photos, model, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*({"PHOTOS": photos, "MODEL": model}.get(w, w) for w in words))
    assert code == 2, err
    assert out == ""
    assert sentence in err
    assert err.splitlines()[-1].startswith("fisherhash: ")
    assert "Traceback" not in err
    assert not (tmp_path / "m").exists()


def test_data_that_cannot_be_trained_on(run, write_photos, tmp_path):
    def refused(data):
        code, out, err = run("train", data, "--out", tmp_path / "m", *TINY)
        assert (code, out) == (2, "")
        assert not (tmp_path / "m").exists()
        return err

    (tmp_path / "empty").mkdir()
    assert "is an empty folder" in refused(tmp_path / "empty")
    one = write_photos(tmp_path / "one", {"a": 5})
    assert "only one class, 'a'; at least two" in refused(one)
    single = write_photos(tmp_path / "single", {"a": 5, "b": 5, "lonely": 1})
    assert "with one image only: 'lonely'" in refused(single)
    plain = tmp_path / "plain"
    shutil.copytree(one / "a", plain)
    assert "has no labels and dfh learns from them" in refused(plain)
    (tmp_path / "none.csv").write_text("path,label\none/a/00.png,\none/a/01.png,\n")
    assert "label" in refused(tmp_path / "none.csv")
    (tmp_path / "one.csv").write_text("path\none/a/00.png\none/a/01.png\n")
    assert "label" in refused(tmp_path / "one.csv")


def test_a_csv_with_missing_labels_names_the_line(run, photos, tmp_path):
    rows = ["path,label"]
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        rows.append(f"{path},{'' if i % 7 == 3 else path.parent.name}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    for words in (["train", tmp_path / "labels.csv", "--out", tmp_path / "m", *TINY],
                  ["check-data", tmp_path / "labels.csv"]):  # fmt: skip
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert "labels.csv, line 5: the label is missing (6 of 42 rows have none)" in err


def test_train_prints_json_and_nothing_else_on_stdout(run, photos, tmp_path):
    words = ["train", photos, "--out", tmp_path / "m", *TINY, "--seed", "3", "--set", "margin=0.5"]
    code, out, err = run(*words, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["settings"]["seed"] == 3
    assert result["settings"]["epochs"] == 2
    assert result["options"]["margin"] == 0.5
    assert result["data"]["train"] == result["data"]["database"] > result["data"]["query"] > 0
    assert result["evaluation"]["map"] == pytest.approx(result["results"]["mAP"])
    for talk in (
        "photos: 42 images, 3 classes",
        "custom, seed 0:",
        "mAP ",
        " over 3 queries (ties",
        "model in",
    ):
        assert talk in err
    card = (tmp_path / "m" / "README.md").read_text()
    assert f"| mAP | {result['results']['mAP']:.4g} |" in card
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "already holds a model" in err
    code, out, err = run(*words, "--overwrite", "--no-evaluate")
    assert (code, out) == (0, "")
    assert "\nmAP" not in err
    assert run(*words, "--overwrite", "--resume")[0] == 2


def test_train_lists_the_files_it_skipped(run, write_photos, tmp_path):
    root = write_photos(tmp_path / "data", {"a": 12, "b": 12})
    bad = [path for i, path in enumerate(sorted(root.rglob("*.png"))) if i % 5 == 0]
    for path in bad:
        path.write_bytes(b"\x89PNG")
    code, out, err = run("train", root, "--out", tmp_path / "m", *TINY, "--json")
    assert code == 0, err
    assert f"{len(bad)} images could not be read, skipped; the first is" in err
    assert json.loads(out)["data"]["skipped"] == len(bad)
    with (tmp_path / "m" / "skipped.csv").open(newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert sorted(names) == sorted(path.relative_to(root).as_posix() for path in bad)
    code, out, err = run("evaluate", "--model", tmp_path / "m", "--data", root, "--json")
    assert code == 0, err
    assert {item["name"] for item in json.loads(out)["skipped"]} == set(names)
    assert f"skipped {names[0]}: " in err


def test_encode_prints_the_hex_of_the_api(run, photos, model):
    paths = sorted((photos / "b").glob("*.png"))[:5]
    expected = codes.to_hex(Hasher.load(model).encode(paths))
    code, out, err = run("encode", *paths, "--model", model)
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{c}  {p}" for c, p in zip(expected, paths, strict=True)]
    code, out, err = run("encode", *paths, "--model", model, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "bits": 12,
        "codes": [{"name": str(p), "code": c} for p, c in zip(paths, expected, strict=True)],
    }
    code, out, _ = run("encode", photos / "b", "--model", model)
    assert out.splitlines()[:5] == [f"{c}  {p}" for c, p in zip(expected, paths, strict=True)]
    assert len(out.splitlines()) == 14


def test_nested_codes_from_training_to_encoding(run, photos, tmp_path):
    folder = tmp_path / "nested"
    flags = ["--backbone", "tiny", "--epochs", 1, "--bits", 24, "--frozen", "--no-evaluate"]
    code, _, err = run("train", photos, "--out", folder, "--nested", "8,16", *flags)
    assert code == 0, err
    path = photos / "a" / "00.png"
    whole = run("encode", path, "--model", folder)[1]
    for bits in (8, 16):
        code, out, err = run("encode", path, "--model", folder, "--bits", bits)
        assert (code, err) == (0, "")
        assert out == f"{whole[: bits // 4]}  {path}\n"
    code, out, err = run("encode", path, "--model", folder, "--bits", 12)
    assert (code, out) == (0, f"{whole[:3]}0  {path}\n")
    assert "not trained for codes of 12 bits" in err
    code, out, err = run("encode", path, "--model", folder, "--bits", 32)
    assert (code, out) == (2, "")
    assert "codes of 24 bits can be cut to 1 to 24 bits, got 32" in err
    _, out, err = run("evaluate", "--model", folder, "--data", photos, "--json")
    nested = json.loads(out)["nested"]
    assert list(nested) == ["8", "16"]
    truncated = Hasher.load(folder).truncated(8)
    truncated.save(tmp_path / "eight")
    alone = json.loads(
        run("evaluate", "--model", tmp_path / "eight", "--data", photos, "--json")[1]
    )
    assert nested["8"]["map"] == pytest.approx(alone["evaluation"]["map"], abs=1e-9)
    assert "mAP of the first 8 bits" in run("evaluate", "--model", folder, "--data", photos)[1]
    for wrong, sentence in (("8,x", "--nested must be a whole number"), ("32", "got 32")):
        code, _, err = run("train", photos, "--out", tmp_path / "x", "--nested", wrong, *flags)
        assert code == 2
        assert sentence in err


def test_encode_writes_a_file_of_codes(run, photos, model, tmp_path):
    target = tmp_path / "new" / "codes.npz"
    code, out, err = run("encode", photos / "a", "--model", model, "--out", target)
    assert (code, out) == (0, "")
    assert "14 codes of 12 bits in" in err
    assert [path.name for path in target.parent.iterdir()] == ["codes.npz"]
    with np.load(target) as found:
        assert found["bits"] == 12
        paths = [Path(name) for name in found["names"]]
        assert paths == sorted((photos / "a").glob("*.png"))
        np.testing.assert_array_equal(found["codes"], Hasher.load(model).encode(paths))


def test_encode_lists_bad_files_and_fails_only_when_all_are_bad(run, photos, model, tmp_path):
    good = photos / "a" / "00.png"
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    code, out, err = run("encode", bad, good, "--model", model)
    assert code == 0
    assert out == f"{codes.to_hex(Hasher.load(model).encode(good))[0]}  {good}\n"
    assert f"skipped {bad}: not an image" in err
    code, out, err = run("encode", bad, good, "--model", model, "--out", tmp_path / "c.npz")
    assert (code, out) == (0, "")
    assert (tmp_path / "c.skipped.csv").read_text().splitlines()[1].startswith(str(bad))
    code, out, err = run("encode", bad, "--model", model)
    assert (code, out) == (1, "")
    assert "fisherhash: no image could be read" in err


def test_encode_into_a_place_that_cannot_be_written(run, photos, model, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "codes.npz"
    code, out, err = run("encode", photos / "a", "--model", model, "--out", target)
    assert (code, out) == (1, "")
    assert str(tmp_path / "file") in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["encode", "evaluate"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "config"])
def test_a_damaged_model_is_a_failure(run, photos, model, tmp_path, verb, damage):
    folder = shutil.copytree(model, tmp_path / "m")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-5] ^= 4
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-500])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    words = [photos / "a"] if verb == "encode" else ["--data", photos]
    code, out, err = run(verb, *words, "--model", folder)
    assert (code, out) == (1, "")
    assert ("config.json" if damage == "config" else "model.safetensors") in err
    assert "is missing" in err if damage == "gone" else "damaged" in err


def test_evaluate_prints_protocol_checksum_and_everything_needed_to_repeat_it(run, photos, model):
    split = json.loads((model / "split.json").read_text())
    code, out, _ = run("evaluate", "--model", model, "--data", photos)
    assert code == 0
    assert f"checksum {split['checksum'][:16]}" in out
    assert "custom, seed 0" in out
    assert re.search(r"^model +.*model: dfh, 12 bits$", out, re.MULTILINE)
    code, out, _ = run("evaluate", "--model", model, "--data", photos, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["protocol"]["checksum"] == split["checksum"]
    assert result["protocol"]["protocol"] == "custom"
    assert {"fisherhash", "python", "torch", "numpy"} <= result["versions"].keys()
    assert result["model"]["method"] == "dfh"
    assert result["model"]["bits"] == 12
    assert result["model"]["options"]["margin"] == 1.0
    assert result["model"]["settings"]["seed"] == 4
    for part in ("train", "query", "database"):
        assert result["protocol"][part] == result["model"]["data"][part] > 0
    assert 0 < result["evaluation"]["map"] <= 1
    assert result["evaluation"]["map_lower"] <= result["evaluation"]["map"]
    assert result["evaluation"]["map"] <= result["evaluation"]["map_upper"]
    assert result["skipped"] == []
    assert result["seconds"] > 0


@pytest.mark.parametrize("name", ["hashnet", "dfh", "swuxyj", "dsh-analysis"])
def test_evaluate_with_the_number_another_evaluator_prints(run, photos, model, name):
    words = ["evaluate", "--model", model, "--data", photos, "--compat", name]
    code, out, err = run(*words, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["compat"]["name"] == name or name in json.dumps(result["compat"])
    assert name in run(*words)[1]


def test_evaluate_takes_the_split_the_model_was_trained_with(run, write_photos, tmp_path):
    """A picture added later is in the folder, and not in the split."""
    root = write_photos(tmp_path / "data", {"a": 10, "b": 10})
    run("train", root, "--out", tmp_path / "m", *TINY)
    before = json.loads((tmp_path / "m" / "split.json").read_text())["checksum"]
    shutil.copy(root / "a" / "00.png", root / "a" / "99.png")
    words = ["evaluate", "--model", tmp_path / "m", "--data", root, "--json"]
    assert json.loads(run(*words)[1])["protocol"]["checksum"] == before
    drawn = json.loads(run(*words, "--protocol", "custom")[1])["protocol"]
    assert drawn["checksum"] != before
    assert drawn["query"] + drawn["database"] == 21


def test_evaluate_draws_curves(run, photos, model, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["evaluate", "--model", model, "--data", photos, "--plots", tmp_path / "p"]
    code, out, err = run(*words, "--json")
    assert code == 0, err
    json.loads(out)
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"pr.png", "pr.svg", "precision.png", "recall.svg", "distances.png"} <= names


def test_check_data_says_what_is_wrong_and_where(run, write_photos, tmp_path):
    root = write_photos(tmp_path / "data", {"a": 5, "b": 5})
    code, out, err = run("check-data", root)
    assert code == 0, out
    assert "nothing wrong was found" in out
    assert (out.count("data: 10 images, 2 classes"), "10 images" in err) == (1, False)
    (root / "a" / "bad.png").write_bytes(b"text")
    shutil.copy(root / "a" / "00.png", root / "b" / "copy.png")
    code, out, err = run("check-data", root)
    assert code == 1
    assert "a/bad.png: not an image" in out
    assert "a/00.png = b/copy.png" in out
    code, out, err = run("check-data", root, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    assert [item["name"] for item in report["unreadable"]] == ["a/bad.png"]
    assert report["duplicates"] == report["conflicts"] == [["a/00.png", "b/copy.png"]]
    lonely = write_photos(tmp_path / "lonely", {"a": 3, "only": 1})
    code, out, err = run("check-data", lonely)
    assert code == 1
    assert "classes with one image: 1" in out


def test_check_data_finds_queries_that_are_in_the_database(run, write_photos, tmp_path):
    root = write_photos(tmp_path / "data", {"a": 6, "b": 6})
    names = [f"{c}/{i:02d}.png" for c in "ab" for i in range(6)]
    (root / "train.txt").write_text("\n".join(names[1:]))
    (root / "database.txt").write_text("\n".join(names[1:]))
    (root / "query.txt").write_text("\n".join([names[0], names[7]]))
    code, out, _ = run("check-data", root)
    assert code == 1
    assert "queries in the database: 1\n  b/01.png" in out
    assert json.loads(run("check-data", root, "--json")[1])["overlaps"] == {
        "query in database": ["b/01.png"],
        "query in train": ["b/01.png"],
    }


def test_methods_lists_them_with_their_options(run):
    code, out, err = run("methods")
    assert (code, err) == (0, "")
    assert "Push for Quantization: Deep Fisher Hashing (BMVC 2019)" in out
    assert "margin=1.0" in out
    listed = json.loads(run("methods", "--json")[1])
    assert {"dfh", "itq", "lsh"} <= listed.keys()
    assert listed["itq"]["options"] == {"iterations": 50}
    assert listed["itq"]["supervision"] == "none"


def test_one_method_is_explained(run):
    code, out, err = run("methods", "dfh")
    assert (code, err) == (0, "")
    choices = "How C is found. One of exact, gradient, released."
    assert f"  --set center_step=exact\n    {choices}\n" in out
    assert "psi, the weight of" in out
    assert list(json.loads(run("methods", "dfh", "--json")[1])) == ["dfh"]
    code, out, err = run("methods", "dhf")
    assert (code, out) == (2, "")
    assert "Did you mean 'dfh'?" in err


def test_doctor_prints_its_findings(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert re.search(r"^  fisherhash +" + re.escape(__version__), out, re.MULTILINE)
    assert os.environ["FISHERHASH_CACHE"] in out
    found = json.loads(run("doctor", "--json")[1])
    assert found["packages"]["numpy"]


def test_help_in_a_process_of_its_own_imports_nothing_heavy():
    script = """if True:
        import sys
        from fisherhash.cli import main
        for words in (["--help"], ["train", "--help"], ["trian"], ["train", "x", "--outt", "y"]):
            try:
                main(words)
            except SystemExit as ended:
                print(ended.code, file=sys.stderr)
        heavy = {"torch", "numpy", "numba", "PIL", "safetensors", "scipy", "matplotlib"}
        print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if not line.startswith("fisherhash:")] == [
        "0",
        "0",
        "2",
        "2",
        "[]",
    ], done.stderr


def test_exit_codes_and_streams_of_a_real_process(photos, model, tmp_path, run_command_limited):
    """One image with a name that is not UTF-8, one reader that goes away, one full disk."""
    odd = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(odd, "wb") as file:
        file.write((photos / "a" / "00.png").read_bytes())
    words = ["encode", os.fsdecode(odd), "--model", str(model)]
    done = command(*words)
    expected = codes.to_hex(Hasher.load(model).encode(photos / "a" / "00.png"))[0]
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == expected.encode() + b"  " + odd + b"\n"

    target = tmp_path / "codes.npz"
    target.write_bytes(b"the old file")
    done = run_command_limited(200, "encode", photos, "--model", model, "--out", target)
    assert done.returncode == 1
    assert f"could not write {target}: File too large" in done.stderr
    assert target.read_bytes() == b"the old file"
    assert sorted(os.listdir(tmp_path)) == sorted([os.fsdecode(b"caf\xe9.png"), "codes.npz"])
    assert command("trian").returncode == 2


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-c", "from fisherhash.cli import main; main()", "methods"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    err = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert err == b""
    assert process.returncode == 141


def test_encode_ends_quietly_when_its_reader_has_enough(photos, model):
    """As ``encode … | head -1``: less than a buffer of output, written when nobody reads."""
    words = ["encode", str(photos / "a"), "--model", str(model)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from fisherhash.cli import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    err = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert err == b""
    assert process.returncode == 141


def test_a_missing_extra_is_noticed_before_the_work(run, photos, model, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    monkeypatch.setattr(Hasher, "load", None)  # nothing is loaded
    words = ["evaluate", "--model", model, "--data", photos, "--plots", tmp_path / "plots"]
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert "pip install 'fisherhash[plots]'" in err
    assert not (tmp_path / "plots").exists()


def test_ctrl_c_says_how_to_go_on(run, photos, tmp_path, monkeypatch):
    from fisherhash.training import loop

    write = loop.Loop._checkpoint

    def checkpoint(self, epoch):
        write(self, epoch)
        raise KeyboardInterrupt

    words = ["train", photos, "--out", tmp_path / "m", *TINY]
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_checkpoint", checkpoint)
        code, out, err = run(*words)
    assert (code, out) == (130, "")
    assert "interrupted; the same command continues where it stopped" in err
    code, _, err = run(*words, "--resume")
    assert code == 0, err
    assert Hasher.load(tmp_path / "m").bits == 12


def test_images_are_read_from_any_working_folder(run, photos, model, monkeypatch):
    expected = run("encode", photos / "a" / "00.png", "--model", model)[1].split()[0]
    monkeypatch.chdir(photos / "a")
    assert run("encode", "00.png", "--model", model)[1] == f"{expected}  00.png\n"


def test_odd_images_encode_like_their_plain_selves(run, photos, model, tmp_path):
    with Image.open(photos / "a" / "00.png") as picture:
        picture.convert("RGBA").save(tmp_path / "Übung 1.PNG")
        picture.save(tmp_path / "same.bmp")
    _, out, _ = run("encode", tmp_path, photos / "a" / "00.png", "--model", model)
    assert len({line.split()[0] for line in out.splitlines()}) == 1
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize("verb", ["encode", "evaluate"])
@pytest.mark.parametrize("device", ["cuda99", "toaster"])
def test_a_device_that_is_not_there_is_a_sentence(run, photos, model, verb, device):
    words = [photos / "a"] if verb == "encode" else ["--data", photos]
    code, out, err = run(verb, *words, "--model", model, "--device", device)
    assert (code, out) == (2, "")
    assert f"the device '{device}' cannot be used" in err


@pytest.mark.parametrize("flag", ["--bits", "--seed", "--epochs"])
def test_what_would_have_to_be_rounded_is_refused(run, photos, tmp_path, flag):
    code, _, err = run("train", photos, "--out", tmp_path / "m", flag, "1.5")
    assert code == 2
    assert f"{flag} must be a whole number, got '1.5'" in err


def test_encode_overwrites_no_image(run, photos, model, tmp_path):
    mine = tmp_path / "mine.jpg"
    mine.write_bytes(b"precious")
    code, _, err = run("encode", photos / "a", "--model", model, "--out", mine)
    assert code == 2
    assert "must be a file that ends in .npz" in err
    assert mine.read_bytes() == b"precious"


@pytest.mark.parametrize("verb", ["train", "compare"])
def test_a_folder_with_something_else_in_it_is_left_alone(run, photos, tmp_path, verb):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    words = [photos] if verb == "train" else ["--data", photos]
    for extra in ([], ["--overwrite"]) if verb == "train" else ([],):
        code, _, err = run(verb, *words, "--out", tmp_path / "mine", "--backbone", "tiny", *extra)
        assert code == 2
        assert "nothing in it was changed" in err
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_a_models_split_is_found_by_the_names_of_its_images(run, photos, model, tmp_path):
    """Also in a folder of another name, with a picture more and one less."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(photos, moved)
    split = json.loads((model / "split.json").read_text())
    (moved / split["query"][0]).unlink()
    shutil.copy(moved / split["query"][1], moved / "a" / "one more.png")
    code, out, err = run("evaluate", "--model", model, "--data", moved, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["protocol"]["query"] == len(split["query"]) - 1
    assert found["queries_trained_on"] == 0
    assert "1 of the split's" in err


def test_queries_that_were_trained_on_are_counted(run, photos, model, tmp_path):
    split = json.loads((model / "split.json").read_text())
    names = split["database"] if split["train"] == "database" else split["train"]
    rows = {"query": names[:6], "train": names[6:], "database": names[6:]}
    lists = tmp_path / "lists"
    shutil.copytree(photos, lists)
    for part, items in rows.items():
        (lists / f"{part}.txt").write_text("".join(f"{name}\n" for name in items))
    code, _, err = run("evaluate", "--model", model, "--data", lists, "--protocol", "lists")
    assert code == 0, err
    assert "WARNING: the model was trained on 6 of the 6 queries" in err
