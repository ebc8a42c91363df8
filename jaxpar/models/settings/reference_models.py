"""The reference models that a job may name, each with its settings and its class."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.models.settings.classifiers import (
    AlexNetConfig,
    GoogLeNetConfig,
    MLPConfig,
    ResNetConfig,
    UNetConfig,
    VGGConfig,
    ViTConfig,
)
from jaxpar.models.settings.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model that jaxpar brings.

    Attributes:
      settings: The dataclass of its settings: the keys of a job's `[model]` table.
      path: Its class, `module:Class`, which takes the settings and `rngs`.
    """

    settings: type
    path: str


REFERENCE_MODELS: Mapping[str, ReferenceModel] = {
    "decoder": ReferenceModel(DecoderConfig, "jaxpar.models.decoder:Decoder"),
    "vit": ReferenceModel(ViTConfig, "jaxpar.models.classifiers:ViT"),
    "resnet": ReferenceModel(ResNetConfig, "jaxpar.models.convolutional:ResNet"),
    "unet": ReferenceModel(UNetConfig, "jaxpar.models.convolutional:UNet"),
    "alexnet": ReferenceModel(AlexNetConfig, "jaxpar.models.convolutional:AlexNet"),
    "vgg": ReferenceModel(VGGConfig, "jaxpar.models.convolutional:VGG"),
    "googlenet": ReferenceModel(GoogLeNetConfig, "jaxpar.models.convolutional:GoogLeNet"),
    "mlp": ReferenceModel(MLPConfig, "jaxpar.models.classifiers:MLP"),
}
MODELS: Mapping[str, type] = {name: model.settings for name, model in REFERENCE_MODELS.items()}
