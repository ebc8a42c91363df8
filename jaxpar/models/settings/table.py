"""The models that a job may name, and the settings of each."""

from collections.abc import Mapping

from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.models.settings.mlp import MLPConfig
from jaxpar.models.settings.resnet import ResNetConfig
from jaxpar.models.settings.vit import ViTConfig

MODELS: Mapping[str, type] = {
    "decoder": DecoderConfig,
    "vit": ViTConfig,
    "resnet": ResNetConfig,
    "mlp": MLPConfig,
}
