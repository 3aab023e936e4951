"""Public PyTorch models, unmodified, with random weights.

PyTorch and the models' packages are imported where one is built; a test is skipped there if they are lacking.
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
class Entry:
    """A model of the zoo.

    Attributes
    ----------
    name : str
        Its package and its own name.
    make : callable
        Returns the module, with the weights of whatever random state there is.
    example_shape : tuple of int
        Shape of an input, (N, C, *spatial).
    """

    name: str
    make: Callable[[], Module]
    example_shape: tuple[int, ...]

    def build(self) -> Module:
        """Return the module in train mode, float32, the same every time; skip the test where its package is lacking."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2026)
            module = self.make().train()
            _randomise(module)
            _calibrate(module, self.example_shape)
        return module


def public(package: str) -> Any:
    """Return a module of one of the public packages, or skip the test that needs it."""
    pytest.importorskip("torch")
    _let_torchvision_import()
    return pytest.importorskip(package, reason=f"{package} is not here: pip install neondist[zoo]")


def _let_torchvision_import() -> None:
    """Define what torchvision lacks if it was built for another variant of PyTorch: its own operators.

    No model here uses them, but as it is imported it gives rules to operators of these names.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in "nms", "qnms":
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


def _randomise(module: Module) -> None:
    """Give random values to parameters that are constant at first: behind a scale of zero there are no gradients."""
    import torch

    with torch.no_grad():
        for values in module.parameters():
            if values.numel() > 1 and values.min() == values.max():
                values.copy_((values.min() == 1) + 0.4 * torch.rand_like(values) - 0.2)


def _calibrate(module: Module, shape: tuple[int, ...]) -> None:
    """Set running statistics to those of a random batch: with any others, eval mode all but loses the input."""
    import torch

    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean over all batches, of which this is the first
    if norms:
        with torch.no_grad():
            # in float64, so that another order of sums gives the same in float32
            module.double()(torch.randn(shape, dtype=torch.float64))
        module.float()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _torchvision(name: str, **arguments: Any) -> Module:
    return getattr(public("torchvision.models"), name)(weights=None, **arguments)


def _vgg_features() -> Module:
    """Return what comes before the classifier, whose 120 million parameters have nothing to do with space."""
    vgg = public("torchvision.models.vgg")
    return vgg.make_layers(vgg.cfgs["A"], batch_norm=True)


def _alexnet_features() -> Module:
    """Return what comes before the classifier, for the same reason."""
    import torch

    alexnet = _torchvision("alexnet")
    return torch.nn.Sequential(alexnet.features, alexnet.avgpool)


def _segments(name: str) -> Module:
    models = public("torchvision.models.segmentation")
    return getattr(models, name)(weights=None, weights_backbone=None, num_classes=3)


def _video(name: str) -> Module:
    return getattr(public("torchvision.models.video"), name)(weights=None, num_classes=7)


def _swin() -> Module:
    swin = public("torchvision.models.swin_transformer")
    return swin.SwinTransformer([2, 2], 24, [2, 2], [2, 4], [3, 3], stochastic_depth_prob=0.0, num_classes=7)


def _timm(name: str, **arguments: Any) -> Module:
    return public("timm").create_model(name, pretrained=False, num_classes=7, **arguments)


def _smp(name: str, encoder: str = "resnet18", **arguments: Any) -> Module:
    models = public("segmentation_models_pytorch")
    return getattr(models, name)(encoder, encoder_weights=None, classes=3, **arguments)


def _monai(name: str, **arguments: Any) -> Module:
    return getattr(public("monai.networks.nets"), name)(spatial_dims=3, in_channels=1, out_channels=2, **arguments)


def _vae(part: str, attention: bool) -> Module:
    """Return the encoder of a latent diffusion model's images, to the mean of its codes, or the decoder."""
    diffusers = public("diffusers.models.autoencoders.autoencoder_kl")
    import torch

    whole = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 16),
        norm_num_groups=4,
        mid_block_add_attention=attention,
    )

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.quant_conv = whole.encoder, whole.quant_conv

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.quant_conv(self.encoder(x))

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.post_quant_conv = whole.decoder, whole.post_quant_conv

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.post_quant_conv(z))

    return {"encoder": Encoder, "decoder": Decoder}[part]()


def _entry(name: str, make: Callable[..., Module], shape: tuple[int, ...], *args: Any, **arguments: Any) -> Entry:
    return Entry(name, partial(make, *args, **arguments), shape)


def _torchvision_entry(name: str, *spatial: int, **arguments: Any) -> Entry:
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
    _entry("torchvision.fcn_resnet50", _segments, (2, 3, 49, 37), "fcn_resnet50"),
    _entry("torchvision.deeplabv3_resnet50", _segments, (2, 3, 49, 37), "deeplabv3_resnet50"),
    _entry("torchvision.lraspp_mobilenet_v3_large", _segments, (2, 3, 65, 49), "lraspp_mobilenet_v3_large"),
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
"""the models, by no more than a name where their own defaults are small enough"""
