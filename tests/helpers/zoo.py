"""Public PyTorch models, unmodified, with random weights.

PyTorch and the packages of the models are imported when a model is built; tests are skipped without them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    Module = torch.nn.Module


@dataclass(frozen=True)
class ZooEntry:
    """Model of the zoo.

    Attributes
    ----------
    name : str
        Package and name of the model.
    make : callable
        Returns the module, with weights from the global random state.
    example_shape : tuple of int
        Input shape (N, C, *spatial).
    """

    name: str
    make: Callable[[], Module]
    example_shape: tuple[int, ...]

    def build(self) -> Module:
        """Return the module in train mode and float32, identical every time; skip the test without its package."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2026)
            module = self.make().train()
            _randomise_constants(module)
            _calibrate(module, self.example_shape)
        return module


def import_public(package: str) -> Any:
    """Import a module of a public package, or skip the test."""
    pytest.importorskip("torch")
    _define_missing_operators()
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install neondist[zoo]")


def _define_missing_operators() -> None:
    """Define the operators that torchvision lacks if it was built for a different build of PyTorch.

    No model uses them, but torchvision registers rules for them on import.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in "nms", "qnms":
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


def _randomise_constants(module: Module) -> None:
    """Randomise parameters with constant initial values, because a scale of zero stops gradients."""
    import torch

    with torch.no_grad():
        for values in module.parameters():
            if values.numel() > 1 and values.min() == values.max():
                values.copy_((values.min() == 1) + 0.4 * torch.rand_like(values) - 0.2)


def _calibrate(module: Module, shape: tuple[int, ...]) -> None:
    """Set running statistics to those of a random batch, because eval mode with others suppresses the input."""
    import torch

    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # cumulative average, of a single batch
    if norms:
        with torch.no_grad():
            # in float64, so that the order of sums does not affect the float32 values
            module.double()(torch.randn(shape, dtype=torch.float64))
        module.float()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _torchvision(name: str, **arguments: Any) -> Module:
    return getattr(import_public("torchvision.models"), name)(weights=None, **arguments)


def _vgg_features() -> Module:
    """Return VGG without its classifier, whose 120 million parameters are not spatial."""
    vgg = import_public("torchvision.models.vgg")
    return vgg.make_layers(vgg.cfgs["A"], batch_norm=True)


def _alexnet_features() -> Module:
    """Return AlexNet without its classifier."""
    import torch

    alexnet = _torchvision("alexnet")
    return torch.nn.Sequential(alexnet.features, alexnet.avgpool)


def _segmentation(name: str) -> Module:
    models = import_public("torchvision.models.segmentation")
    return getattr(models, name)(weights=None, weights_backbone=None, num_classes=3)


def _video(name: str) -> Module:
    return getattr(import_public("torchvision.models.video"), name)(weights=None, num_classes=7)


def _swin() -> Module:
    swin = import_public("torchvision.models.swin_transformer")
    return swin.SwinTransformer([2, 2], 24, [2, 2], [2, 4], [3, 3], stochastic_depth_prob=0.0, num_classes=7)


def _timm(name: str, **arguments: Any) -> Module:
    return import_public("timm").create_model(name, pretrained=False, num_classes=7, **arguments)


def _smp(name: str, encoder: str = "resnet18", **arguments: Any) -> Module:
    models = import_public("segmentation_models_pytorch")
    return getattr(models, name)(encoder, encoder_weights=None, classes=3, **arguments)


def _monai(name: str, **arguments: Any) -> Module:
    return getattr(import_public("monai.networks.nets"), name)(
        spatial_dims=3, in_channels=1, out_channels=2, **arguments
    )


def _vae(part: str, attention: bool) -> Module:
    """Return the encoder of a latent diffusion model, to the mean of its codes, or the decoder."""
    diffusers = import_public("diffusers.models.autoencoders.autoencoder_kl")
    import torch

    autoencoder = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        norm_num_groups=4,
        mid_block_add_attention=attention,
    )

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.quant_conv = autoencoder.encoder, autoencoder.quant_conv

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.quant_conv(self.encoder(x))

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.post_quant_conv = autoencoder.decoder, autoencoder.post_quant_conv

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.post_quant_conv(z))

    return {"encoder": Encoder, "decoder": Decoder}[part]()


def _entry(name: str, make: Callable[..., Module], shape: tuple[int, ...], *args: Any, **arguments: Any) -> ZooEntry:
    return ZooEntry(name, partial(make, *args, **arguments), shape)


def _torchvision_entry(name: str, *spatial: int, **arguments: Any) -> ZooEntry:
    return _entry(f"torchvision.{name}", _torchvision, (2, 3, *spatial), name, num_classes=7, **arguments)


ZOO = (
    _torchvision_entry("resnet18", 65, 49),
    _torchvision_entry("resnet50", 65, 49),
    _torchvision_entry("mobilenet_v2", 65, 49),
    _torchvision_entry("mobilenet_v3_small", 65, 49),
    _torchvision_entry("efficientnet_b0", 65, 49),
    _torchvision_entry("densenet121", 65, 49),
    _torchvision_entry("googlenet", 65, 49, aux_logits=False, init_weights=False),
    _torchvision_entry("convnext_tiny", 67, 49),
    _torchvision_entry("regnet_y_400mf", 65, 49),
    _torchvision_entry("shufflenet_v2_x0_5", 65, 49),
    _torchvision_entry("squeezenet1_1", 65, 49),
    _torchvision_entry("mnasnet0_5", 65, 49),
    _entry("torchvision.vgg11_features", _vgg_features, (2, 3, 67, 49)),
    _entry("torchvision.alexnet_features", _alexnet_features, (2, 3, 99, 83)),
    _torchvision_entry("inception_v3", 139, 107, aux_logits=False, init_weights=False),
    _entry("torchvision.r3d_18", _video, (2, 3, 7, 33, 21), "r3d_18"),
    _entry("torchvision.swin", _swin, (2, 3, 52, 44)),
    _entry("torchvision.fcn_resnet50", _segmentation, (2, 3, 49, 37), "fcn_resnet50"),
    _entry("torchvision.deeplabv3_resnet50", _segmentation, (2, 3, 49, 37), "deeplabv3_resnet50"),
    _entry("torchvision.lraspp_mobilenet_v3_large", _segmentation, (2, 3, 65, 49), "lraspp_mobilenet_v3_large"),
    _entry("timm.resnet26d", _timm, (2, 3, 65, 49), "resnet26d"),
    _entry("timm.efficientnet_lite0", _timm, (2, 3, 65, 49), "efficientnet_lite0"),
    _entry("timm.convnext_atto", _timm, (2, 3, 67, 49), "convnext_atto"),
    _entry("timm.resnetv2_50x1_bit", _timm, (2, 3, 65, 49), "resnetv2_50x1_bit"),
    _entry("timm.repvgg_a0", _timm, (2, 3, 65, 49), "repvgg_a0"),
    _entry("timm.dla34", _timm, (2, 3, 96, 64), "dla34"),
    _entry("timm.mobilenetv4_conv_small", _timm, (4, 3, 65, 49), "mobilenetv4_conv_small"),
    _entry("timm.hrnet_w18_small", _timm, (2, 3, 64, 96), "hrnet_w18_small"),
    _entry("timm.mobilevit_xxs", _timm, (2, 3, 64, 96), "mobilevit_xxs"),
    _entry("timm.gcvit_xxtiny", _timm, (2, 3, 224, 224), "gcvit_xxtiny"),
    _entry("timm.volo_d1", _timm, (2, 3, 224, 224), "volo_d1_224"),
    _entry("smp.Segformer", _smp, (2, 3, 96, 64), "Segformer", "mit_b0"),
    _entry("smp.Unet", _smp, (2, 3, 96, 64), "Unet"),
    _entry("smp.UnetPlusPlus", _smp, (2, 3, 56, 40), "UnetPlusPlus", encoder_depth=3, decoder_channels=(32, 24, 16)),
    _entry("smp.FPN", _smp, (2, 3, 96, 64), "FPN"),
    _entry("smp.PSPNet", _smp, (2, 3, 96, 64), "PSPNet"),
    _entry("smp.DeepLabV3Plus", _smp, (2, 3, 96, 64), "DeepLabV3Plus"),
    _entry("smp.Linknet", _smp, (2, 3, 96, 64), "Linknet"),
    _entry("smp.Unet_mobilenet_v2", _smp, (2, 3, 96, 64), "Unet", "mobilenet_v2"),
    _entry("smp.MAnet", _smp, (2, 3, 96, 64), "MAnet"),
    _entry("smp.PAN", _smp, (2, 3, 128, 128), "PAN"),
    _entry("smp.UPerNet", _smp, (2, 3, 96, 64), "UPerNet", decoder_channels=64),
    _entry("monai.UNet", _monai, (1, 1, 20, 12, 28), "UNet", channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
    _entry("monai.BasicUNet", _monai, (1, 1, 37, 17, 23), "BasicUNet", features=(8, 8, 16, 16, 32, 8)),
    _entry("monai.SegResNet", _monai, (1, 1, 24, 40, 16), "SegResNet"),
    _entry(
        "monai.DynUNet",
        _monai,
        (1, 1, 20, 12, 28),
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 16, 32],
    ),
    _entry("monai.VNet", _monai, (1, 1, 16, 32, 16), "VNet"),
    _entry("monai.AttentionUnet", _monai, (1, 1, 20, 12, 28), "AttentionUnet", channels=(8, 16, 32), strides=(2, 2)),
    _entry("diffusers.vae_encoder", _vae, (2, 3, 43, 37), "encoder", attention=False),
    _entry("diffusers.vae_decoder", _vae, (2, 4, 11, 7), "decoder", attention=False),
    _entry("diffusers.vae_encoder_with_attention", _vae, (2, 3, 43, 37), "encoder", attention=True),
    _entry("diffusers.vae_decoder_with_attention", _vae, (2, 4, 11, 7), "decoder", attention=True),
)
"""public models, with default arguments where these are small enough"""
