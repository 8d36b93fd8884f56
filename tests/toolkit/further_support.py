"""The toolkit's module of an engine that the project does not have; see `further_engine`."""

from tests.toolkit.further_engine import REFERENCE, ReferenceSession

from edgekit_toolkit.engines.ort import take_codes
from edgekit_toolkit.engines.record import EngineSupport, ModelMaker
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.scheme import ASYMMETRIC


class ReferenceModel(OnnxModel):
    """An ONNX model that the reference evaluator runs; see `Model`."""

    engine = REFERENCE.name

    def open(self, outputs=None, *, threads, rewrites=True):
        session = self.open_session(threads=threads)
        names = outputs or [spec.name for spec in session.outputs]

        def run(feeds):
            values = session.run(feeds)
            return [values[name] for name in names]

        return run

    def open_session(self, *, threads):
        return ReferenceSession(self.content)


class ReferenceQuantizer(OnnxQuantizer):
    """The quantizer of ONNX models, whose forms run on the reference evaluator."""

    def build(self, form):
        model = super().build(form)
        return None if model is None else ReferenceModel(model.proto)

    def writer(self, factors):
        write = super().writer(factors)
        return lambda plan: ReferenceModel(write(plan).proto)


def _open_quantizer(model, _target, *, threads, **_conversion):
    return ReferenceQuantizer(model.proto, ASYMMETRIC, threads=threads)


def _build(model, form, _dims):
    return ReferenceQuantizer(model.proto, ASYMMETRIC, threads=1).build(form)


SUPPORT = EngineSupport(
    name=REFERENCE.name,
    maker=ModelMaker(
        open_quantizer=_open_quantizer, build=_build, convert=ReferenceModel, convert_codes=take_codes
    ),
    kinds=frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.STATIC_INT8}),
    judged_on=REFERENCE.name,
    competes=True,
)
