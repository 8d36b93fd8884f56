"""The four network architectures: small, batch-normalised, without branches that need a mask.

Every network maps one float32 batch to logits [N, classes]; softmax is left to the caller.
"""

from collections import OrderedDict
from typing import cast

from torch import Tensor, nn


def _conv_block(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A 2-D convolution that keeps the size (at stride 1), batch normalisation and ReLU6."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), activation=nn.ReLU6()))


def _separable_block(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """A 3x3 depthwise and a 1x1 pointwise convolution, each normalised and clipped."""
    depthwise = _conv_block(inputs, inputs, 3, stride=stride, groups=inputs)
    return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=_conv_block(inputs, outputs, 1)))


def mnist5k_dscnn() -> nn.Sequential:
    """A depthwise-separable CNN: [N, 1, 28, 28] -> [N, 10].

    Source: Howard et al., MobileNets (2017), section 3.1, in miniature.
    """
    return nn.Sequential(
        OrderedDict(
            stem=_conv_block(1, 24, 3, stride=2),
            block1=_separable_block(24, 48),
            block2=_separable_block(48, 64, stride=2),
            block3=_separable_block(64, 64),
            block4=_separable_block(64, 96),
            pool=nn.AvgPool2d(7),
            flatten=nn.Flatten(),
            classify=nn.Linear(96, 10),
        )
    )


def digits_cnn() -> nn.Sequential:
    """A plain CNN with max pooling: [N, 1, 8, 8] -> [N, 10]."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1, bias=False),
            norm2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv3=nn.Conv2d(32, 32, 3, padding=1, bias=False),
            norm3=nn.BatchNorm2d(32),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.3),
            classify=nn.Linear(32 * 4 * 4, 10),
        )
    )


class _DilatedBlock(nn.Module):
    """A dilated 1-D convolution with a residual connection; keeps [N, channels, frames]."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm1d(channels)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.activation(self.norm(self.conv(x))))


def japanese_vowels_tcn() -> nn.Sequential:
    """A temporal convolution network: [N, 12, 29] -> [N, 9].

    Source: Bai et al., An Empirical Evaluation of Generic Convolutional and Recurrent Networks
    (2018), section 3; not causal here, since the whole utterance is known.
    """
    channels = 48
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv1d(12, channels, 3, padding=1, bias=False),
            norm=nn.BatchNorm1d(channels),
            activation=nn.ReLU(),
            block1=_DilatedBlock(channels, 1),
            block2=_DilatedBlock(channels, 2),
            block3=_DilatedBlock(channels, 4),
            pool=nn.AvgPool1d(29),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.3),
            classify=nn.Linear(channels, 9),
        )
    )


def italy_power_mlp() -> nn.Sequential:
    """A multilayer perceptron: [N, 1, 24] -> [N, 2]."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(24, 32),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(32, 16),
            relu2=nn.ReLU(),
            classify=nn.Linear(16, 2),
        )
    )
