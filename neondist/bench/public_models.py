"""Public PyTorch models that are built into `neondist bench torch`, and the shapes of their training inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PublicModel(NamedTuple):
    """A public model.

    Attributes
    ----------
    family : str
    factory : 'MODULE:NAME'
    shape : (N, C, *spatial)
    arguments : arguments of the factory
    """

    family: str
    factory: str
    shape: tuple[int, ...]
    arguments: Mapping[str, Any] = {}


_VISION, _SEGMENTATION = "torchvision.models", "torchvision.models.segmentation"
_NO_WEIGHTS = {"weights": None, "weights_backbone": None}
_FNO_ARGUMENTS = {"n_modes": (16, 16), "in_channels": 3, "out_channels": 1, "hidden_channels": 32}
MODELS = {
    "efficientnet_b0": PublicModel("CNN", f"{_VISION}:efficientnet_b0", (1, 3, 256, 256)),
    "convnext_tiny": PublicModel("CNN", f"{_VISION}:convnext_tiny", (1, 3, 256, 256)),
    "fcn_resnet50": PublicModel("segmentation", f"{_SEGMENTATION}:fcn_resnet50", (1, 3, 256, 256), _NO_WEIGHTS),
    "unetplusplus": PublicModel(
        "segmentation", "segmentation_models_pytorch:UnetPlusPlus", (1, 3, 256, 256),
        {"encoder_name": "resnet18", "encoder_weights": None},
    ),
    "segresnet": PublicModel("3-D", "monai.networks.nets:SegResNet", (1, 1, 64, 64, 64)),
    "r3d_18": PublicModel("3-D", f"{_VISION}.video:r3d_18", (1, 3, 16, 112, 112)),
    "vit_b_16": PublicModel("ViT", f"{_VISION}:vit_b_16", (1, 3, 224, 224)),
    "vit_small": PublicModel("ViT", "timm:create_model", (1, 3, 224, 224), {"model_name": "vit_small_patch16_224"}),
    "swin_t": PublicModel("windows", f"{_VISION}:swin_t", (1, 3, 224, 224)),
    "gcvit_xxtiny": PublicModel("windows", "timm:create_model", (1, 3, 224, 224), {"model_name": "gcvit_xxtiny"}),
    "fno": PublicModel("FNO", "neuralop.models:FNO", (4, 3, 128, 128), _FNO_ARGUMENTS),
    "tfno": PublicModel("FNO", "neuralop.models:TFNO", (4, 3, 128, 128), _FNO_ARGUMENTS),
}  # fmt: skip
"""two models of each of six families"""
DEFAULT_EXTENTS = {1: (4096,), 2: (224, 224), 3: (64, 64, 64)}
"""input extents of other modules, by the number of spatial axes of their first convolution"""
