"""Models of twelve architectures and more, as torch's exporter writes them: what packages, what converts.

    ~/.cache/edgekit/torch-2.13.0-python3.11/bin/python -m benchmarks.torch_exports [--only NAME ...]

The environment is that of `scripts/test-with-torch`. Each model has seeded random weights and is exported
with the exporter's own operator set and with 23. It is packaged by `edgekit package --backend ort`, and
converted to TFLite and compared with onnxruntime on two inputs. Ends with 1 if a model has no engine.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from benchmarks.results import make_parser
from torch import Tensor, nn
from torch.nn import functional

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.importers.sizes import StatedSizes, settle
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.tflite.check import convert_checked


class MaskedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.table, self.encoder = nn.Embedding(100, 32), nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(self.table(ids), src_key_padding_mask=~mask)


class RotaryDecoder(nn.Module):
    """One causal layer with rotary places, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(100, 32), nn.RMSNorm(32)
        self.inputs, self.output = nn.Linear(32, 96, bias=False), nn.Linear(32, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        batch, length, width = x.shape
        q, k, v = self.inputs(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        angles = torch.arange(length).float()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)

        def turned(z: Tensor) -> Tensor:
            even, odd = z[..., 0::2], z[..., 1::2]
            cosine, sine = angles.cos(), angles.sin()
            return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)

        attended = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.output(x + attended.transpose(1, 2).reshape(batch, length, width))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 96, activation="gelu", batch_first=True, norm_first=True)
        self.patches, self.encoder = nn.Conv2d(3, 48, 8, 8), nn.TransformerEncoder(layer, 2)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 48)), nn.Parameter(torch.randn(1, 17, 48))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 24, 4, 4), nn.Conv2d(24, 24, 7, padding=3, groups=24)
        self.norm, self.wide, self.narrow = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.narrow(functional.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.last = self._block(3, 16), self._block(16, 32), self._block(32, 16)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        inner = self.inner(functional.max_pool2d(wide, 2))
        inner = inner + functional.interpolate(
            functional.avg_pool2d(inner, 2), scale_factor=2, mode="bicubic"
        )
        return self.last(torch.cat((wide, self.up(inner)), 1))


class Recurrent(nn.Module):
    def __init__(self, kind: str, directions: int = 1) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(16, 24, batch_first=True, bidirectional=directions == 2)
        self.head = nn.Linear(24 * directions, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def signal_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(1, 16, 9, 2, 4), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 5, dilation=2)),
        *(nn.GLU(1), nn.InstanceNorm1d(16, affine=True), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        nn.Linear(16, 4),
    )


class DetectionHead(nn.Module):
    """Boxes of a grid, and the twenty best of them by score."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, 4, 1), nn.Conv2d(16, 9, 1)
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        self.register_buffer("grid", torch.stack((columns, rows), -1)[None])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.head(functional.silu(self.body(x))).permute(0, 2, 3, 1)
        centres, sizes = features[..., :2].sigmoid() + self.grid, features[..., 2:4].exp()
        boxes = torch.cat((centres - sizes / 2, centres + sizes / 2), -1).flatten(1, 2)
        scores, places = features[..., 4:].sigmoid().flatten(1, 2).amax(-1).topk(20, 1)
        return torch.gather(boxes, 1, places[..., None].expand(-1, -1, 4)), scores


class SelectiveScan(nn.Module):
    """A state-space layer whose steps are written out, with Einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.steps, self.output = nn.Linear(16, 32), nn.Linear(16, 24), nn.Linear(16, 16)
        self.decay = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inputs(x).chunk(2, -1)
        pace, into, out = self.steps(u).split([16, 4, 4], -1)
        pace = functional.softplus(pace)
        decay = torch.exp(torch.einsum("btd,dn->btdn", pace, -self.decay.exp()))
        change = torch.einsum("btd,btn,btd->btdn", pace, into, u)
        state, rows = torch.zeros(x.shape[0], 16, 4), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + change[:, step]
            rows.append(torch.einsum("bdn,bn->bd", state, out[:, step]))
        return self.output(torch.stack(rows, 1) * functional.silu(gate))


class Warp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        identity = functional.affine_grid(torch.eye(2, 3)[None], [1, 3, 24, 24], align_corners=False)
        grid = identity + self.flow(x).permute(0, 2, 3, 1) * 0.05
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


MODELS = {
    "transformer with masks": (MaskedTransformer(), (torch.zeros(1, 12).long(), torch.ones(1, 12).bool())),
    "decoder with rotary places": (RotaryDecoder(), (torch.zeros(1, 16).long(),)),
    "ViT": (VisionTransformer(), (torch.zeros(1, 3, 32, 32),)),
    "ConvNeXt": (ConvNeXt(), (torch.zeros(1, 3, 64, 64),)),
    "UNet with GroupNorm": (UNet(), (torch.zeros(1, 3, 32, 32),)),
    "LSTM, both directions": (Recurrent("LSTM", 2), (torch.zeros(1, 20, 16),)),
    "GRU of 300 steps": (Recurrent("GRU"), (torch.zeros(1, 300, 16),)),
    "RNN": (Recurrent("RNN"), (torch.zeros(1, 20, 16),)),
    "Conv1D": (signal_network(), (torch.zeros(1, 1, 256),)),
    "detection head": (DetectionHead(), (torch.zeros(1, 3, 64, 64),)),
    "selective scan": (SelectiveScan(), (torch.zeros(1, 12, 16),)),
    "warp by a flow": (Warp(), (torch.zeros(1, 3, 24, 24),)),
}
PACKAGING = ("-t", "x86-64", "--backend", "ort", "--budget", "size=1GB,drop=50%", "--search-seconds", "0")
EXPORTER_SETS = (None, 23)


def drawn_feeds(model: onnx.ModelProto, seed: int) -> Feeds:
    draw, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype == np.bool_:
            feeds[value.name] = draw.random(sizes) < 0.8
        elif dtype.kind == "i":
            feeds[value.name] = draw.integers(0, 100, sizes).astype(dtype)
        else:
            feeds[value.name] = draw.standard_normal(sizes).astype(dtype)
    return feeds


def convert_for_litert(path: Path) -> str:
    """Convert as packaging does, operators written out that onnxruntime fails on."""
    try:
        source = settle(load_onnx(path), StatedSizes({}, None, None), Decoding()).source
        feeds = [drawn_feeds(source.model.proto, seed) for seed in (0, 1)]
        optimised = optimise(source.model.proto, batch=None, feeds=feeds[:1]).model
        return f"{len(convert_checked(optimised, {}, feeds)):,} bytes"
    except EdgekitError as error:
        return f"refused: {str(error)[:200]}"


def package_for_ort(path: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "edgekit_cli", "package", path, *PACKAGING, "-o", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "packaged" if done.returncode == 0 else f"refused: {done.stderr.strip()[-200:]}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    without_engine = 0
    for name in parser.parse_args().only:
        torch.manual_seed(0)
        module, example = MODELS[name]
        for stated in EXPORTER_SETS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                module.eval()
                torch.onnx.export(module, example, path, opset_version=stated, verbose=False)
                version = onnx.load(path, load_external_data=False).opset_import[0].version
                ort, litert = package_for_ort(path, Path(folder) / "out"), convert_for_litert(path)
            without_engine += ort.startswith("refused") and litert.startswith("refused")
            print(f"| {name} | {version} | {ort} | {litert} |", flush=True)
    return 1 if without_engine else 0


if __name__ == "__main__":
    sys.exit(main())
