"""The models that a job may name, and the settings of each."""

from collections.abc import Mapping

from jaxpar.models.settings.decoder import DecoderSettings
from jaxpar.models.settings.mlp import MLPSettings
from jaxpar.models.settings.resnet import ResNetSettings
from jaxpar.models.settings.vit import ViTSettings

MODELS: Mapping[str, type] = {
    "decoder": DecoderSettings,
    "vit": ViTSettings,
    "resnet": ResNetSettings,
    "mlp": MLPSettings,
}
