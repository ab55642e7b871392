"""Image encoders of transformers, small and randomly initialised, from a local folder."""

import json

import numpy as np
import pytest
import torch

from fisherhash import backbones
from fisherhash.errors import FisherhashError, UsageError
from fisherhash.model.hasher import Hasher
from fisherhash.model.heads import LinearHead
from fisherhash.model.torch_network import TorchNetwork

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "image_size": 32, "patch_size": 16}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def vit(tmp_path):
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**SIZES))
    model.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit", model.eval()


def test_features_are_the_models_pooled_output(vit):
    folder, model = vit
    backbone = backbones.create(f"hf:{folder}")
    assert (backbone.features, backbone.preprocessing.size) == (16, 32)
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    normalised = (pixels - backbone.mean) / backbone.std
    with torch.no_grad():
        expected = model(pixel_values=normalised).pooler_output
        torch.testing.assert_close(backbone(pixels), expected)


def test_preprocessing_comes_from_the_models_own_config(vit):
    folder, _ = vit
    config = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    config |= {"do_center_crop": True, "resample": 3, "image_mean": [0.5, 0.25, 0.0]}
    config |= {"image_std": [0.5, 1.0, 2.0]}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    found = backbones.create(f"hf:{folder}").preprocessing
    assert (found.size, found.crop, found.interpolation) == (32, 0.8, "bicubic")
    assert (found.mean, found.std) == ((127.5, 63.75, 0.0), (127.5, 255.0, 510.0))


def test_a_classifier_has_no_pooling_layer_drawn_at_random(tmp_path):
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    backbone = backbones.create(f"hf:{tmp_path}")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        tokens = model.vit((pixels - backbone.mean) / backbone.std).last_hidden_state
        torch.testing.assert_close(backbone(pixels), tokens[:, 0])
    assert not any("pooler" in name for name in backbone.state_dict())


def test_the_image_part_of_a_model_of_images_and_texts(tmp_path):
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    text |= {"intermediate_size": 8, "max_position_embeddings": 4, "bos_token_id": 0}
    text |= {"eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    backbone = backbones.create(f"hf:{tmp_path}")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        normalised = (pixels - backbone.mean) / backbone.std
        expected = model.vision_model(pixel_values=normalised).pooler_output
        torch.testing.assert_close(backbone(pixels), expected)


def test_a_saved_model_needs_the_folder_of_its_backbone_no_more(vit, tmp_path):
    folder, _ = vit
    network = TorchNetwork(backbones.create(f"hf:{folder}"), torch.device("cpu"))
    hasher = Hasher(network, LinearHead(16, 12).finished(), method="none")
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    expected = hasher.logits(image)
    hasher.save(tmp_path / "model")
    folder.rename(tmp_path / "elsewhere")
    loaded = Hasher.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.logits(image), expected)
    assert loaded.fingerprint() == hasher.fingerprint()


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FisherhashError, match="could not be read or fetched"):
        backbones.create(f"hf:{tmp_path / 'none'}")


def test_a_model_of_texts_is_refused(tmp_path):
    sizes = {k: v for k, v in SIZES.items() if "size" not in k or k in ("hidden_size",)}
    config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="does not run on images"):
        backbones.create(f"hf:{tmp_path}")
