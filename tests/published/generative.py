"""Models that draw images, as their authors write them, and small. None knows of jaxpar.

VAE    linen   draws noise with a key of the call; loss of two terms
UNet   nnx     diffusion: time embedding, skip connections, group norms, attention, transposed convolutions
GAN    nnx     generator and discriminator, each with an optimizer of its own
DiT    linen   transformer for diffusion, which the time modulates
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from published.example import Example, images


class VAE(nn.Module):
    latents: int = 8

    def setup(self):
        self.hidden = nn.Dense(32)
        self.mean, self.log_variance = nn.Dense(self.latents), nn.Dense(self.latents)
        self.decoder = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(64)])

    def __call__(self, image, z_rng):
        hidden = nn.relu(self.hidden(image))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = jax.random.normal(z_rng, mean.shape)
        return self.decoder(mean + jnp.exp(log_variance / 2) * noise), mean, log_variance

    def generate(self, latent):
        return nn.sigmoid(self.decoder(latent))


def vae_loss(model, batch, z_rng):
    pixels = batch["image"].reshape(len(batch["image"]), -1)
    logits, mean, log_variance = model(pixels, z_rng)
    rebuilt = optax.sigmoid_binary_cross_entropy(logits, pixels).sum()
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance))
    return {name: (x, len(pixels)) for name, x in [("loss", rebuilt + divergence), ("kl", divergence)]}


def of_time(time, dim):
    """Returns sines and cosines [batch, dim] of a time of 0..1."""
    angles = 1000 * time[:, None] * jnp.exp(-jnp.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResBlock(nnx.Module):
    def __init__(self, into: int, out: int, time: int, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (
            nnx.GroupNorm(into, num_groups=4, rngs=rngs),
            nnx.GroupNorm(out, num_groups=4, rngs=rngs),
        )
        self.conv1 = nnx.Conv(into, out, kernel_size=(3, 3), padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(out, out, kernel_size=(3, 3), padding=1, rngs=rngs)
        self.time_proj = nnx.Linear(time, out, rngs=rngs)
        self.shortcut = nnx.Conv(into, out, kernel_size=(1, 1), rngs=rngs) if into != out else None

    def __call__(self, x, time):
        y = self.conv1(nnx.silu(self.norm1(x)))
        y = y + self.time_proj(nnx.silu(time))[:, None, None, :]
        y = self.conv2(nnx.silu(self.norm2(y)))
        return y + (x if self.shortcut is None else self.shortcut(x))


class SelfAttention(nnx.Module):
    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(channels, num_groups=4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=channels, decode=False, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x).reshape(x.shape[0], -1, x.shape[-1])
        return x + self.attention(y).reshape(x.shape)


class UNet(nnx.Module):
    def __init__(self, channels=(8, 16), *, rngs: nnx.Rngs):
        low, high = channels
        self.time_mlp = nnx.Sequential(
            nnx.Linear(low, 4 * low, rngs=rngs), nnx.silu, nnx.Linear(4 * low, low, rngs=rngs)
        )
        self.conv_in = nnx.Conv(1, low, kernel_size=(3, 3), rngs=rngs)
        self.down = ResBlock(low, low, low, rngs=rngs)
        self.downsample = nnx.Conv(low, high, kernel_size=(3, 3), strides=(2, 2), rngs=rngs)
        self.middle = ResBlock(high, high, low, rngs=rngs)
        self.attention = SelfAttention(high, rngs=rngs)
        self.upsample = nnx.ConvTranspose(high, low, kernel_size=(2, 2), strides=(2, 2), rngs=rngs)
        self.up = ResBlock(2 * low, low, low, rngs=rngs)
        self.norm_out = nnx.GroupNorm(low, num_groups=4, rngs=rngs)
        self.conv_out = nnx.Conv(low, 1, kernel_size=(3, 3), rngs=rngs)

    def __call__(self, x, time):
        time = self.time_mlp(of_time(time, self.conv_in.out_features))
        skip = self.down(self.conv_in(x), time)
        x = self.attention(self.middle(self.downsample(skip), time))
        x = self.up(jnp.concatenate([self.upsample(x), skip], axis=-1), time)
        return self.conv_out(nnx.silu(self.norm_out(x)))


def noised(image, key):
    """Returns times, noise and images with that much of it."""
    time_key, noise_key = jax.random.split(key)
    time = jax.random.uniform(time_key, (image.shape[0],))
    noise = jax.random.normal(noise_key, image.shape)
    signal = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
    return time, noise, signal * image + jnp.sqrt(1 - signal**2) * noise


def diffusion_loss(model, batch, key):
    time, noise, x = noised(batch["image"], key)
    error = jnp.square(model(x, time) - noise)
    return error.sum(), error.size


class Modulated(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, condition):
        width = x.shape[-1]
        modulation = nn.Dense(6 * width, kernel_init=nn.initializers.normal(0.02))(nn.silu(condition))[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(modulation, 6, axis=-1)
        plain = nn.LayerNorm(use_bias=False, use_scale=False)
        y = plain(x) * (1 + scale1) + shift1
        x = x + gate1 * nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y)
        y = plain(x) * (1 + scale2) + shift2
        return x + gate2 * nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))


class DiT(nn.Module):
    width: int = 16
    patch: int = 2

    @nn.compact
    def __call__(self, image, time):
        rows, height, width, channels = image.shape
        p = self.patch
        condition = nn.Dense(self.width)(of_time(time, self.width))
        x = nn.Conv(self.width, (p, p), strides=p, padding="VALID", name="patchify")(image)
        x = x.reshape(rows, -1, self.width)
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        x = Modulated(heads=4)(x, condition)
        x = nn.Dense(p * p * channels, kernel_init=nn.initializers.normal(0.02))(nn.LayerNorm()(x))
        x = x.reshape(rows, height // p, width // p, p, p, channels)
        return jnp.einsum("bhwpqc->bhpwqc", x).reshape(rows, height, width, channels)


class Generator(nnx.Module):
    def __init__(self, latents: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(latents, 2 * 2 * 16, rngs=rngs)
        self.norm1, self.norm2 = nnx.BatchNorm(16, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.deconv1 = nnx.ConvTranspose(16, 8, kernel_size=(4, 4), strides=(2, 2), rngs=rngs)
        self.deconv2 = nnx.ConvTranspose(8, 1, kernel_size=(4, 4), strides=(2, 2), rngs=rngs)

    def __call__(self, z):
        x = nnx.relu(self.norm1(self.linear(z).reshape(-1, 2, 2, 16)))
        x = nnx.relu(self.norm2(self.deconv1(x)))
        return nnx.sigmoid(self.deconv2(x))


class Discriminator(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(4, 4), strides=(2, 2), rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(4, 4), strides=(2, 2), rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 16, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.conv1(x), 0.2)
        x = nnx.leaky_relu(self.conv2(x), 0.2)
        return self.linear(x.reshape(x.shape[0], -1))[:, 0]


class GAN(nnx.Module):
    def __init__(self, latents: int = 8, *, rngs: nnx.Rngs):
        self.latents = latents
        self.generator, self.discriminator = Generator(latents, rngs=rngs), Discriminator(rngs=rngs)


bce = optax.sigmoid_binary_cross_entropy


def drawn_with(key, model, batch):
    """Returns noise for as many images as the batch has."""
    return jax.random.normal(key, (len(batch["image"]), model.latents))


def gan_loss(model, batch, key):
    """Both losses at once: each player's gradients are of its own loss alone."""
    fake = model.generator(drawn_with(key, model, batch))
    graph, weights = nnx.split(model.discriminator)
    critic = nnx.merge(graph, jax.lax.stop_gradient(weights))
    of_generator = bce(critic(fake), jnp.ones(len(fake))).sum()
    real, drawn = model.discriminator(batch["image"]), model.discriminator(jax.lax.stop_gradient(fake))
    of_discriminator = bce(real, jnp.ones(len(real))).sum() + bce(drawn, jnp.zeros(len(drawn))).sum()
    shown = {"loss": of_generator + of_discriminator, "generator": of_generator, "discriminator": of_discriminator}
    return {name: (loss, len(fake)) for name, loss in shown.items()}


def discriminator_loss(model, batch, key):
    fake = model.generator(drawn_with(key, model, batch))
    real, drawn = model.discriminator(batch["image"]), model.discriminator(fake)
    return (bce(real, jnp.ones(len(real))) + bce(drawn, jnp.zeros(len(drawn)))).sum(), len(real)


def generator_loss(model, batch, key):
    fake = model.generator(drawn_with(key, model, batch))
    return bce(model.discriminator(fake), jnp.ones(len(fake))).sum(), len(fake)


def players(params):
    """Returns whose each parameter is: `generator` or `discriminator`."""
    return {player: player for player in params}


# SGD for the generator: its norms cancel the biases before them
PLAYERS = {"generator": optax.sgd(0.05, 0.5), "discriminator": optax.adam(2e-3, b1=0.5, eps=1e-4)}


def pixels(rng):
    return {"image": images(rng)["image"]}


def flat(batch):
    return batch["image"].reshape(len(batch["image"]), -1), jax.random.key(0)


EXAMPLES = {
    "vae": Example(module=VAE(), loss=vae_loss, batch=pixels, inputs=flat, optimizer=optax.adam(1e-2)),
    "unet": Example(module=UNet, loss=diffusion_loss, batch=pixels, optimizer=optax.adam(3e-3, eps=1e-4)),
    "dit": Example(
        module=DiT(),
        loss=diffusion_loss,
        batch=pixels,
        inputs=lambda batch: (batch["image"], np.zeros(1, np.float32)),
        optimizer=optax.adamw(3e-3, eps=1e-4),
    ),
    "gan": Example(module=GAN, loss=gan_loss, batch=pixels, optimizer=optax.multi_transform(PLAYERS, players)),
}
