"""Small models of pictures of timm and torchvision, which are optional in the tests."""

from typing import Any

__all__ = ["TIMM", "TORCHVISION", "VISION_SIZE"]

VISION_SIZE = 32
_WIDTH = {"embed_dim": 32, "num_heads": 2}
_PYRAMID = {"depths": (1, 1, 1, 1)}

# A model that `timm.create_model` knows, or a class, and its sizes; all take pictures of 32 by 32.
TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": {"depth": 4, "img_size": 32, "patch_size": 8, **_WIDTH},
    "deit3_small_patch16_224": {"depth": 4, "img_size": 32, "patch_size": 8, **_WIDTH},
    "beit_base_patch16_224": {"depth": 4, "img_size": 32, "patch_size": 8, **_WIDTH},
    "eva02_tiny_patch14_224": {"depth": 4, "img_size": 32, "patch_size": 8, **_WIDTH},
    "cait_xxs24_224": {"depth": 4, "img_size": 32, "patch_size": 8, **_WIDTH},
    "MlpMixer": {"num_blocks": 4, "img_size": 32, "patch_size": 8, "embed_dim": 32},
    "convnext_atto": {**_PYRAMID, "dims": (8, 8, 16, 16)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "depths": (2, 2),
        "window_size": 4,
        "embed_dim": 16,
        "num_heads": (2, 2),
        "drop_path_rate": 0.0,
    },
    "MetaFormer": {**_PYRAMID, "dims": (8, 8, 16, 16)},
    "pvt_v2_b0": _PYRAMID,
    "xcit_nano_12_p8_224": {"depth": 4, "img_size": 32, **_WIDTH},
    "resnet10t": {"drop_rate": 0.0},
}
# A function of `torchvision.models`, and its sizes.
TORCHVISION: dict[str, dict[str, Any]] = {
    "VisionTransformer": {
        "image_size": 32,
        "patch_size": 8,
        "num_layers": 4,
        "num_heads": 2,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
    "SwinTransformer": {
        "patch_size": [4, 4],
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": [4, 4],
        "stochastic_depth_prob": 0.0,
    },
    "efficientnet_b0": {"stochastic_depth_prob": 0.0, "dropout": 0.0},
    "mobilenet_v3_small": {"dropout": 0.0},
    "resnet18": {},
}
